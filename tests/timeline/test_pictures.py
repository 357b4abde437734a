from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any

import pytest
from PIL import Image

from infinipipe.timeline import Timeline
from infinipipe.timeline.describe import describe_chunks, oklch
from infinipipe.timeline.figure import Box, Figure, Label, Lines, Polygon, draw, hatching
from infinipipe.timeline.page import html_page
from infinipipe.timeline.png import to_png
from infinipipe.timeline.svg import to_svg
from infinipipe.timeline.themes import THEMES, ThemeName
from infinipipe.timeline.trace import chrome_trace
from infinipipe.timeline.units import readable_bytes, readable_seconds, ticks


def test_chunks_are_described_and_coloured_by_sequence(simulated: Timeline) -> None:
    chunks = describe_chunks(simulated)
    assert chunks[1].slices == ("sequence 0, slice 2 of 4, tokens 3,000 to 5,500 of 9,000",)
    assert chunks[5].slices[1] == "sequence 2, all 500 tokens"
    assert (chunks[1].context, chunks[8].pipeline) == (3000, 1)
    assert len({chunk.colors["F"] for chunk in chunks[:4]}) == 1
    assert chunks[0].colors["F"] != chunks[4].colors["F"]
    assert len({chunks[0].colors[kind] for kind in "FBW"}) == 3
    assert oklch(1.0, 0.0, 0.0) == "#ffffff"
    assert oklch(0.0, 0.0, 0.0) == "#000000"


def test_the_trace_holds_every_action_message_and_sample(simulated: Timeline, measured: Timeline) -> None:
    events = json.loads(chrome_trace([simulated, measured]))["traceEvents"]
    counts = Counter((event["pid"], event["ph"]) for event in events)
    num_actions = sum(map(len, simulated.spans))
    num_recomputes = sum(span.recompute > 0 for row in simulated.spans for span in row)
    assert counts[0, "X"] == num_actions + num_recomputes
    assert counts[1, "X"] == num_actions
    assert counts[0, "s"] == counts[0, "f"] == len(simulated.messages) > 0
    assert counts[0, "C"] == sum(map(len, simulated.memory))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "simulated", 1: "measured, step 3"}
    first = next(event for event in events if event["ph"] == "X" and event["tid"] == 1)
    assert first["name"] == "F0"
    assert first["ts"] == pytest.approx(1e6 * simulated.spans[1][0].start)


def test_arrows_of_the_trace_start_and_end_in_their_actions(simulated: Timeline) -> None:
    events = json.loads(chrome_trace([simulated]))["traceEvents"]
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            spans.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for event in events:
        if event["ph"] in "sf":
            assert any(start <= event["ts"] <= end for start, end in spans[event["tid"]])


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_stands_alone(simulated: Timeline, measured: Timeline) -> None:
    page = html_page([simulated, measured], title="a </script><b> & title")
    assert not re.findall(r"(?:src|href|url|import|fetch)\s*[=(]", page)
    assert "{{" not in page
    assert "http" not in page
    data = page_data(page)
    assert data["title"] == "a </script><b> & title"
    assert [t["title"] for t in data["timelines"]] == ["simulated", "measured, step 3"]
    assert len(data["timelines"][0]["stages"][1]["spans"]) == 18


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_figure_shows_every_action_once(simulated: Timeline, theme: ThemeName) -> None:
    figure = draw([simulated], theme=theme)
    titles = [
        shape.title for shape in figure.shapes if isinstance(shape, Box) and shape.title.startswith(("forw", "back"))
    ]
    assert len(titles) == len(set(titles)) == sum(map(len, simulated.spans))
    assert figure.background == THEMES[theme]["panel"]
    assert sum(isinstance(s, Lines) and s.dashed for s in figure.shapes) == simulated.num_stages + 1


def inside(figure: Figure) -> bool:
    points = [(s.x, s.y) for s in figure.shapes if isinstance(s, Box | Label)]
    points += [point for s in figure.shapes if isinstance(s, Lines | Polygon) for point in s.points]
    return all(0 <= x <= figure.width and 0 <= y <= figure.height for x, y in points)


def test_all_shapes_lie_inside_the_figure(simulated: Timeline, measured: Timeline) -> None:
    assert inside(draw([simulated, measured]))
    assert inside(draw([measured, simulated], width=700))


def test_svg_is_well_formed(simulated: Timeline, measured: Timeline) -> None:
    figure = draw([simulated, measured])
    tree = ElementTree.fromstring(to_svg(figure))
    assert len(list(tree)) == len(figure.shapes) + 1
    texts = {element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Simulated", "Measured, step 3", "stage 0", "stage 1", "recompute", "of 3.00 GiB"} <= texts


def test_png_shows_what_the_figure_says(simulated: Timeline) -> None:
    """The middle of every broad forward is of its chunk's colour, or of its label's on it."""
    figure = draw([simulated])
    image = Image.open(io.BytesIO(to_png(figure, scale=2.0)))
    assert image.size == (round(2 * figure.width), round(2 * figure.height))
    seen = 0
    for shape in figure.shapes:
        if isinstance(shape, Box) and shape.title.startswith("forward") and shape.width > 4:
            pixel = image.getpixel((round(2 * (shape.x + 1.5)), round(2 * (shape.y + 3))))
            assert isinstance(pixel, tuple)
            assert "#{:02x}{:02x}{:02x}".format(*pixel[:3]) == shape.fill
            seen += 1
    assert seen > sum(map(len, simulated.spans)) / 4


def test_an_empty_step_can_be_drawn(simulated: Timeline) -> None:
    empty = Timeline(simulated.source, (), ((), ()))
    assert to_png(draw([empty])).startswith(b"\x89PNG")
    ElementTree.fromstring(to_svg(draw([empty])))
    assert page_data(html_page([empty]))["timelines"][0]["makespan"] == 0


def test_hatching_stays_inside_its_box() -> None:
    for width, height in ((3.0, 24.0), (100.0, 24.0), (24.0, 24.0)):
        points = hatching(10, 20, width, height)
        assert len(points) % 2 == 0
        assert len(points) > 0
        assert all(10 <= x <= 10 + width and 20 <= y <= 20 + height for x, y in points)


def test_units_and_ticks() -> None:
    assert [readable_seconds(s) for s in (0.0, 2.5, 123.4, 0.0123, 0.25, 4e-5)] == [
        "0 s", "2.50 s", "123.4 s", "12.30 ms", "250.0 ms", "40.0 µs",
    ]  # fmt: skip
    assert [readable_bytes(b) for b in (12, 2048, 5 * 2**30, 80 * 2**30)] == [
        "12 B",
        "2.00 KiB",
        "5.00 GiB",
        "80.0 GiB",
    ]
    assert [readable_bytes(b, round_up=True) for b in (2048, 5 * 2**30 + 1)] == ["2.000 KiB", "5.001 GiB"]
    assert ticks(5.7, 6) == ([(float(k), str(k)) for k in range(6)], "s")
    assert ticks(0.0057, 6)[1] == "ms"
    assert [text for _, text in ticks(0.0057, 6)[0]] == ["0", "1", "2", "3", "4", "5"]
    assert ticks(0.0, 6) == ([(0.0, "0")], "s")
