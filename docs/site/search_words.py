"""Words that people type into the search field of the site, and the pages that have to come first.

mkdocs calls `on_page_markdown`. The words become tags of a page for the search only, which weigh more than titles.
"""

from typing import Any

WORDS: dict[str, tuple[str, ...]] = {
    "index.md": ("install", "cite", "citation"),
    "questions.md": ("logit lens",),
    "write_your_own.md": ("steering", "custom metric"),
    "other_tools.md": ("vLLM", "SGLang", "attention weights", "bertviz"),
    "table.md": ("download", "URL", "read_parquet"),
    "preferences.md": ("norm of queries", "norm of keys", "rotary pair"),
    "attribution.md": ("QK circuit", "OV circuit", "SAE", "singular direction"),
    "concepts.md": ("D_head", "dir_frac", "rope_imag_frac", "M_S", "M_A", "Im(M_t)", "null model", "random null"),
    "parts.md": (
        "mean ablation",
        "zero ablation",
        "resample ablation",
        "knockout",
        "function vector",
        "function vectors",
        "EditNotHonored",
        "KV cache",
        "kvpress",
    ),
    "results/cache_prices.md": ("DuoAttention", "StreamingLLM", "mlx-lm", "KV cache compression", "KV cache eviction"),
    "results/long_sinks.md": ("massive activations",),
    "results/retrieval.md": ("retrieval head", "needle", "haystack", "LOCOS", "QRHead"),
    "grouped_keys.md": (
        "GQA",
        "MQA",
        "grouped-query attention",
        "attention head ablation",
        "key/value group",
        "KV group ablation",
        "KV head",
        "prune KV heads",
        "prune KV groups",
        "KV head pruning",
    ),
    "head_mask.md": ("head_mask", "head mask", "pruning", "prune heads"),
    "circuits.md": (
        "activation patching",
        "attribution patching",
        "EAP",
        "EAP-IG",
        "circuit discovery",
        "AtP*",
        "CPR",
        "CMD",
        "minimal set of heads",
        "sufficient",
        "learned gates",
        "pruning masks",
        "subnetwork probing",
    ),
    "wiring.md": ("path patching", "K-composition", "Q-composition"),
    "your_question.md": ("head importance", "important heads", "head ablation"),
    "detectors.md": ("induction", "induction head", "previous token head", "duplicate token head", "attention sink"),
    "two_models.md": (
        "compare models",
        "model diffing",
        "fine-tuning",
        "adapter",
        "LoRA",
        "same head",
        "duplicate heads",
        "redundant heads",
        "head similarity",
        "CKA",
    ),
    "from_transformerlens.md": ("fold_ln", "HookedTransformer", "process_weights"),
    "gpu.md": ("gpu", "CUDA", "memory", "device_map", "several cards", "tensor parallel"),
    "models.md": (
        "Llama",
        "Qwen",
        "Gemma",
        "Mistral",
        "Pythia",
        "GPT-2",
        "supported models",
        "quantised",
        "quantized",
        "bitsandbytes",
        "4-bit",
        "8-bit",
        "nf4",
        "torchao",
        "load_in_4bit",
        "nnsight",
    ),
    "platforms.md": ("Colab", "Kaggle", "macOS", "MPS", "Windows", "install torch"),
    "scale.md": (
        "too large",
        "cluster",
        "SLURM",
        "sharding",
        "long context",
        "long prompts",
        "32k tokens",
        "out of memory",
    ),
    "training.md": ("RoPE", "rotary", "YaRN", "train"),
    "report.md": ("dashboard", "visualisation", "html"),
    "positional.md": ("positional", "symbolic", "binding"),
    "gallery.md": ("rotary plane",),
}
"""Pages by their file, with the words for which they are the answer."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give a page its words."""
    if words := WORDS.get(page.file.src_uri):
        page.meta["tags"] = list(words)
    return markdown
