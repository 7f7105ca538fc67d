import numpy as np
import pytest
import torch

from kvaudit.engines.vllm.worker.signals import OFFERED, BlendSignals, Distances
from kvaudit.errors import EngineError


def signals(dtype=torch.float32, deviation=None):
    made = torch.Generator().manual_seed(1)
    keys, values, loaded_keys, loaded_values = (torch.randn(5, 6, generator=made).to(dtype) for _ in range(4))
    if deviation is None:
        deviation = (keys.float() - loaded_keys.float()).square().sum(1)
    below = {0: Distances.of(values, keys, loaded_keys, loaded_values)}
    return BlendSignals(1, deviation, keys, values, loaded_values, below), keys, values, loaded_values, loaded_keys


def test_the_deviation_is_the_engines_own_and_read_only():
    deviation = torch.arange(5.0)
    made = signals(deviation=deviation)[0]
    assert made.deviation().tolist() == [0, 1, 2, 3, 4]
    assert made.deviation() is made.key_deviation(1)
    with pytest.raises(ValueError, match="read-only"):
        made.deviation()[0] = 9
    made.deviation_as_recorded()[0] = 9
    assert deviation[0] == 0


def test_values_and_layers_below():
    made, keys, values, loaded_values, loaded_keys = signals()
    expected = ((values - loaded_values) ** 2).sum(1).numpy()
    assert np.allclose(made.value_deviation(1), expected)
    assert np.allclose(made.key_deviation(0), ((values - loaded_keys) ** 2).sum(1))
    assert np.allclose(made.norms("deviation", 1), keys.norm(dim=1))
    assert np.allclose(made.norms("value-deviation", 1), values.norm(dim=1))
    assert np.allclose(made.norms("key-deviation", 0), values.norm(dim=1))
    assert np.allclose(made.norms("value-deviation", 0), keys.norm(dim=1))


def test_precision_grows_with_the_steps_of_a_dtype():
    assert 0 < signals()[0].precision < signals(torch.bfloat16)[0].precision


def test_a_deviation_that_is_not_finite_is_an_error():
    with pytest.raises(EngineError, match="not finite"):
        signals(deviation=torch.tensor([1.0, float("nan"), 0, 0, 0]))[0].deviation()


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.query_attention(0),
        lambda s: s.auxiliary_attention(),
        lambda s: s.written_attention(),
        lambda s: s.output_kl(np.array([0])),
    ],
)
def test_what_the_blender_does_not_show_is_refused(ask):
    assert frozenset({"deviation", "key-deviation", "value-deviation"}) == OFFERED
    with pytest.raises(EngineError, match="LMCBlender does not show"):
        ask(signals()[0])
