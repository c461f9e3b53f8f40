"""What a notebook shows of operators and views is one line with sizes, never a wall of numbers."""

import zoo

from tlspectral.heads.operators.factored import qk_operators
from tlspectral.models.attention import attention_view


def test_operators_and_views_are_one_line():
    model = zoo.shared("bridge", "llama")
    view, operators = attention_view(model), qk_operators(model)
    factors = "w_q=[48, 12], w_k=[48, 12]"
    assert repr(operators[1, 2]) == f"QKOperator(layer=1, head=2, {factors}, rotary=RotaryGeometry)"
    for record in (view, operators):
        assert "bridge: 2 layers, d_model 48" in repr(record)
    for record in (view, operators, operators[1, 2].spectrum(), view.layer(1), view.raw(1), view.output(1)):
        text = repr(record)
        assert "\n" not in text
        assert "tensor(" not in text
        assert len(text) < 300
