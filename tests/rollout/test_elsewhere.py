"""What phases take on another GPU type, from the figures of both."""

import pytest

from rollmuxd.rollout.elsewhere import generation, training
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model

SEVEN = model("qwen2.5-7b")


def test_training_goes_by_the_arithmetic_peaks():
    assert training(gpu("h20"), gpu("h800")) == pytest.approx(148 / 989.5)


def test_on_its_own_type_nothing_changes_and_back_is_the_inverse():
    a, b = gpu("h20"), gpu("h200")
    assert generation(a, a, SEVEN) == 1.0
    assert generation(a, b, SEVEN) * generation(b, a, SEVEN) == pytest.approx(1.0)


def test_generation_lies_between_what_memory_and_what_arithmetic_allow():
    h20, h800, h200 = gpu("h20"), gpu("h800"), gpu("h200")
    assert 148 / 989.5 < generation(h20, h800, SEVEN) < 4000 / 3350
    # the same arithmetic and more bandwidth: faster, but not by all of it
    assert 3350 / 4800 < generation(h800, h200, SEVEN) < 0.95


def test_a_model_that_fits_on_no_node_is_refused_with_both_names():
    with pytest.raises(ValueError, match=r"llama-3.1-70b .* does not fit on a node of rtx-4090"):
        generation(gpu("h800"), gpu("rtx-4090"), model("llama-3.1-70b"))
