"""Each row of the table of special attention belongs to a class that exists: a misspelt name would leave it out."""

import importlib

import pytest
import zoo

import tlspectral as tls
from tlspectral.models.reading.special_cases import SPECIAL_ATTENTION, SpecialAttention, special_attention

CLASSES = {
    "AfmoeAttention": "afmoe.AfmoeAttention",
    "BertAttention": "bert.BertAttention",
    "CodeGenAttention": "codegen.CodeGenAttention",
    "Cohere2Attention": "cohere2.Cohere2Attention",
    "DeepseekV2": "deepseek_v2.DeepseekV2Attention",
    "Exaone4Attention": "exaone4.Exaone4Attention",
    "FalconAttention": "falcon.FalconAttention",
    "GPTNeoSelfAttention": "gpt_neo.GPTNeoSelfAttention",
    "Gemma3Attention": "gemma3.Gemma3Attention",
    "Gemma4": "gemma4.Gemma4TextAttention",
    "GlmMoeDsa": "glm_moe_dsa.GlmMoeDsaAttention",
    "Llama4": "llama4.Llama4TextAttention",
    "NanoChatAttention": "nanochat.NanoChatAttention",
    "RobertaAttention": "roberta.RobertaAttention",
}


@pytest.mark.parametrize("start", [name for name in SPECIAL_ATTENTION if name != "NativeAttention"])
def test_a_row_is_found_by_an_instance_of_a_class_of_transformers(start):
    family, name = CLASSES[start].split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    instance = object.__new__(getattr(module, name))
    assert special_attention(instance) is SPECIAL_ATTENTION[start]


def test_the_row_of_a_native_model_is_found():
    wrapped = zoo.shared("bridge", "llama").blocks[0].attn.original_component
    assert special_attention(wrapped) == SpecialAttention()
    native = tls.load_model("tiny-ape").blocks[0].attn.original_component
    assert special_attention(native) is SPECIAL_ATTENTION["NativeAttention"]


def test_every_row_differs_from_the_ordinary_attention():
    assert all(row != SpecialAttention() for row in SPECIAL_ATTENTION.values())
