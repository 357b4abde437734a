from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinipipe.cli.timeline import run
from infinipipe.settings import SettingError
from infinipipe.timeline import Timeline, TimelineError, save


@pytest.fixture
def files(simulated: Timeline, measured: Timeline, tmp_path: Path) -> tuple[str, str]:
    save(simulated, tmp_path / "simulated.json")
    save(measured, tmp_path / "measured.json")
    return str(tmp_path / "simulated.json"), str(tmp_path / "measured.json")


@pytest.mark.parametrize(
    ("suffix", "start"),
    [("html", b"<!doctype html>"), ("svg", b"<svg "), ("png", b"\x89PNG"), ("json", b'{"traceEvents"')],
)
def test_it_writes_what_the_suffix_says(suffix: str, start: bytes, files: tuple[str, str], tmp_path: Path) -> None:
    alone, both = tmp_path / f"alone.{suffix}", tmp_path / f"both.{suffix.upper()}"
    assert run([files[0], "--output", str(alone)]) == 0
    assert run([files[0], "--measured", files[1], "--output", str(both)]) == 0
    assert alone.read_bytes().startswith(start)
    assert both.read_bytes().startswith(start)
    assert both.stat().st_size > alone.stat().st_size
    assert len(list(tmp_path.iterdir())) == 4


def test_theme_width_and_title_are_used(files: tuple[str, str], tmp_path: Path) -> None:
    picture, page = tmp_path / "a.svg", tmp_path / "a.html"
    run([files[0], "--output", str(picture), "--theme", "dark", "--width", "800"])
    assert 'width="800"' in picture.read_text()
    assert "#1b1f26" in picture.read_text()
    run([files[0], "--output", str(page), "--title", "step 7"])
    assert '"title":"step 7"' in page.read_text()


def test_the_trace_is_complete_json(files: tuple[str, str], tmp_path: Path) -> None:
    run([*files[:1], "--measured", files[1], "--output", str(tmp_path / "trace.json")])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_errors_are_in_the_users_words(files: tuple[str, str], tmp_path: Path) -> None:
    for arguments, words in (
        (["--output", "a.gif"], r"output is 'a\.gif'; it must end in \.html"),
        (["--theme", "blue"], "--theme: Expected one of 'light', 'dark'"),
        (["--width", "10"], "width must be at least 400"),
        (["--output", files[0]], "is a file that is read"),
    ):
        with pytest.raises(SettingError, match=words):
            run([files[0], *arguments])
    with pytest.raises(ValueError, match="there is no folder"):
        run([files[0], "--output", str(tmp_path / "nowhere" / "a.html")])
    with pytest.raises(TimelineError, match="cannot read"):
        run([str(tmp_path / "missing.json"), "--output", str(tmp_path / "a.html")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measured.json", "simulated.json"]
