import dataclasses

import pytest

from swarmnode.compute.stopwatch import Throttle
from swarmnode.errors import UsageError
from swarmnode.plan.offline.gpus import LAYER_PARAMETERS, find_gpu, layer_times
from swarmnode.plan.view import Span
from swarmnode.simulate.environment.peers import BACKWARD, BANDWIDTH_SHARE, FLOPS_SHARE, device_of
from tests.simulate.worlds import model, scenario

LAYER = LAYER_PARAMETERS["llama2_70b"]


def card(name, shape=None):
    return device_of(scenario([None], gpus=[name]), 0, shape or model(parameters=LAYER))


def test_a_measured_card_takes_what_was_measured():
    times = layer_times("A100", LAYER)
    assert card("A100").decode_s(3, 20) == pytest.approx(3 * times.decode_s(20))
    assert card("A100").prompt_s(1, 1000) == pytest.approx(0.008)  # of the published table, 4 x 250 tokens


def test_a_model_of_other_size_takes_proportionally_long():
    smaller = card("T4", model(parameters=LAYER * 9 // 10))
    assert smaller.prompt_s(1, 500) == pytest.approx(0.9 * card("T4").prompt_s(1, 500))


def test_the_roofline_lies_near_the_measurements():
    """Within a third for each card that was measured, at any batch that its memory or arithmetic decides."""
    for name in ("T4", "L4", "A100"):
        gpu, times = find_gpu(name), layer_times(name, LAYER)
        reading_s = 2 * LAYER / (gpu.memory_bytes_per_s * BANDWIDTH_SHARE)
        assert times.decode_s(1) == pytest.approx(reading_s, rel=0.33)
        arithmetic_s = 2 * LAYER * 5000 / (gpu.flops * FLOPS_SHARE)
        assert times.prompt_s(5000) < 1.1 * arithmetic_s


def test_an_unmeasured_card_is_bound_by_memory_then_by_arithmetic():
    gpu, device = find_gpu("RTX 3090"), card("RTX 3090")
    assert (
        device.decode_s(1, 1)
        == device.decode_s(1, 8)
        == pytest.approx(2 * LAYER / (gpu.memory_bytes_per_s * BANDWIDTH_SHARE))
    )
    assert device.prompt_s(1, 4000) == pytest.approx(2 * device.prompt_s(1, 2000))
    assert device.backward_s(1, 4000) == pytest.approx(BACKWARD * device.prompt_s(1, 4000))


def test_a_given_speed_means_what_it_means_for_a_throttled_node():
    shape = model(parameters=123)
    device, throttle = device_of(scenario([50.0], gpus=["A100"]), 0, shape), Throttle(50.0)
    layers = device.layers(shape, Span(2, 5))
    for batch in (1, 7):
        assert device.decode_s(layers, batch) == pytest.approx(throttle.least_s(3, 1))
    for tokens in (2, 128):
        assert device.prompt_s(layers, tokens) == pytest.approx(throttle.least_s(3, tokens))
    assert device.decode_units_per_s == pytest.approx(50.0)


def test_peak_flops_will_do_and_nothing_will_not():
    network = dataclasses.replace(scenario([None]), peak_flops=(1e14,))
    assert device_of(network, 0, model(parameters=LAYER)).prompt_s(1, 1000) == pytest.approx(
        2 * LAYER * 1000 / (1e14 * FLOPS_SHARE)
    )
    with pytest.raises(UsageError, match="decode_units_per_s"):
        device_of(scenario([None]), 0, model())
