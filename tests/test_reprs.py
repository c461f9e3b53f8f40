"""What a notebook shows of operators and views is one line with sizes, never a wall of numbers."""

import pytest
import zoo

from tlspectral.models.attention import attention_view
from tlspectral.operators import ov_operators, qk_operators


def one_line(record) -> str:
    text = repr(record)
    assert "\n" not in text
    assert len(text) < 300
    assert "tensor(" not in text
    return text


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_operators_and_views_are_one_line(backend):
    model = zoo.shared(backend, "llama")
    view, operators = attention_view(model), qk_operators(model)
    sizes = f"{backend}: 2 layers, d_model {view.d_model}"
    assert sizes in one_line(view)
    assert str(view.source["model"]) in one_line(view)
    assert sizes in one_line(operators)
    assert one_line(operators).endswith(", 8 heads)")
    operator = operators[1, 2]
    d_model, d_head = operator.w_q.shape
    factors = f"w_q=[{d_model}, {d_head}], w_k=[{d_model}, {d_head}]"
    assert one_line(operator) == f"QKOperator(layer=1, head=2, {factors}, rotary=RotaryGeometry)"
    assert one_line(operator.antisymmetric()).startswith(f"ThinProduct(left=[{d_model}, ")
    assert "left=" in one_line(operator.phase(0))
    assert f"singular_values=[{d_head}]" in one_line(operator.spectrum())
    output = ov_operators(model, 1)[2]
    assert one_line(output) == f"OVOperator(layer=1, head=2, w_v=[{d_model}, {d_head}], w_o=[{d_head}, {d_model}])"
    assert "w_q=[4, " in one_line(view.layer(1))
    assert "w_o=[4, " in one_line(view.raw(1))
    assert "w_o=[4, " in one_line(view.output(1))
