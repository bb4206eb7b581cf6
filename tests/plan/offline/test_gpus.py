import pytest

from swarmnode.plan.offline.gpus import LAYER_PARAMETERS, find_gpu, gpus_by_name, layer_times

LAYER = LAYER_PARAMETERS["llama2_70b"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 3080", "RTX 3080"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla T4", "T4"),
        ("rtx 2080 ti", "RTX 2080 Ti"),
        ("H100", "H100 PCIe"),
        ("H100 SXM", "H100 SXM"),
    ],
)
def test_cards_are_found_by_the_names_they_go_by(name, known):
    assert find_gpu(name).name == known


@pytest.mark.parametrize("name", [None, "", "abacus", "RTX 9999"])
def test_others_are_not(name):
    assert find_gpu(name) is None
    assert layer_times(name, LAYER) is None


def test_every_card_finds_itself():
    assert all(find_gpu(name) is gpu for name, gpu in gpus_by_name().items())


def test_published_points_are_met_and_lines_drawn_between():
    times = layer_times("L4", LAYER)
    assert times.prompt_s(500) == pytest.approx(0.020)
    assert times.prompt_s(625) == pytest.approx((0.020 + 0.027) / 2)
    assert times.decode_s(1) == times.decode_s(2) == pytest.approx(0.0069)


def test_past_the_last_point_time_grows_with_the_tokens():
    times = layer_times("A100", LAYER)
    last_tokens, last_s = times.prompt[-1]
    assert times.prompt_s(3 * last_tokens) == pytest.approx(3 * last_s)


def test_several_cards_are_faster_and_the_nearer_model_counts():
    assert layer_times("T4 x4", LAYER).prompt_s(1000) < layer_times("T4x2", LAYER).prompt_s(1000)
    assert layer_times("T4", LAYER // 10).parameters == LAYER_PARAMETERS["llama1_30b"]
