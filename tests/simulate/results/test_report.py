import json
import re

from swarmnode.simulate.results.report import report, summary
from swarmnode.simulate.results.result_page import curves
from swarmnode.simulate.settings import ServeSettings, Settings, TrainSettings
from tests.simulate.results.page_parser import ParsedPage
from tests.simulate.worlds import model, run, scenario


def served():
    return run(
        scenario([40.0, 90.0], gpus=["<b>", "A&B"]), model(6), Settings(hours=0.05, serve=ServeSettings(0.5, 16, 8))
    )


def test_the_page_is_whole_and_needs_nothing_else():
    page = report(served())
    assert len(ParsedPage(page).all("svg")) >= 4
    assert "&lt;b&gt;" in page and "<b>" not in page


def test_the_page_tells_the_figures():
    result = served()
    page, figures = report(result), summary(result)
    assert f"{figures['tokens_per_s']:,.1f}" in page
    for name in figures["totals"]:
        assert name in page


def test_training_has_its_own_plots():
    settings = Settings("train", hours=0.05, train=TrainSettings(4, sequence=64))
    page = report(run(scenario([80.0]), model(6, parameters=1000), settings))
    assert "tokens trained" in page and "Duration of the last training step in seconds" in page


def test_the_summary_is_plain_json():
    figures = summary(served())
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert len(figures["curves"]["tokens"]) == len(figures["curves"]["seconds"])


def test_lines_stay_inside_their_frame():
    svg = curves("c", [0.0, 50.0, 100.0], {"a": [0.0, 3.0, 9.7], "b": [1e-9, 0.0, 2.0]})
    for points in re.findall(r'points="([^"]+)"', svg):
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 60 <= x <= 640 and 0 <= y <= 180
