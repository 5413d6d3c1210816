"""The README's first command, as a user runs it: both embedded models served, asked, and gone again."""

from click.testing import CliRunner

from triptych.cli import main


def test_demo_answers_rightly_about_both_drawings():
    """The colour of the scene's own shape, from the cache again, and that of a picture drawn by the other model."""
    ended = CliRunner().invoke(main, ["demo"])
    lines = [line.strip() for line in ended.output.splitlines()]

    assert ended.exit_code == 0, ended.output
    asked = next(line for line in lines if line.startswith("What color is the") and "it was drawn" in line)
    colour = asked.rpartition("it was drawn ")[2].rstrip(")")
    assert lines.count(colour) == 2
    assert "blue" in lines
    assert sum(line.startswith("time to first token") for line in lines) == 4
    assert "Stopped; nothing is left running." in lines
