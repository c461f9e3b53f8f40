"""Ways to save and load a spectral model, and by how much each changes a logit: nothing, or it is refused.

`PYTHONPATH=.:tests/support python tests/support/spectral_saves.py` prints every case that `docs/training.md` sums up.
"""

import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import zoo
from spectral_zoo import move
from zoo import logits

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.spectral_rope import SpectralHookedTransformer, load_spectral, save_spectral, to_spectral


class Way(NamedTuple):
    """One row of the table: `run` saves and loads in a folder, and returns the model before and after."""

    saved: str
    loaded: str
    run: Callable[[Path], tuple[Any, Any]]
    refused: str | None = None  # what the refusal says


def from_pretrained(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def model_in(folder: Path, **options: Any) -> Any:
    zoo.hf_model("llama").save_pretrained(folder / "model", **options)
    return from_pretrained(folder / "model")


@torch.no_grad()
def changed(model: Any, factor: float = 1.3) -> Any:
    """A model of transformers as if it had been fine-tuned, in place."""
    for name, value in model.named_parameters():
        if "up_proj" in name or "v_proj" in name:
            value.mul_(factor)
    return model


def spectral_of(model: Any, **options: Any) -> Any:
    return move(to_spectral(model, **options))


def saved(folder: Path, model: Any, **options: Any) -> Any:
    spectral = spectral_of(model, **options)
    spectral.save_pretrained(folder / "run")
    return spectral


def loaded(folder: Path) -> Any:
    return tls.load_model(folder / "run")


def fine_tuned_before(folder: Path) -> tuple[Any, Any]:
    return saved(folder, changed(model_in(folder))), loaded(folder)


def fine_tuned_to_the_file(folder: Path) -> tuple[Any, Any]:
    model = changed(model_in(folder))
    return saved(folder, model), load_spectral(model, folder / "run")


def fine_tuned_to_the_base_of_its_name(folder: Path) -> tuple[Any, Any]:
    return saved(folder, changed(model_in(folder))), load_spectral(from_pretrained(folder / "model"), folder / "run")


def frozen_before_the_save(folder: Path) -> tuple[Any, Any]:
    spectral = spectral_of(model_in(folder), share_weights=False)
    changed(spectral)
    for name, value in spectral.named_parameters():
        value.requires_grad_(".spectral." in name)
    spectral.save_pretrained(folder / "run")
    return spectral, loaded(folder)


def merged_lora(folder: Path) -> tuple[Any, Any]:
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model_in(folder), config).merge_and_unload().eval()
    return saved(folder, model), loaded(folder)


def state_dict_loaded(folder: Path) -> tuple[Any, Any]:
    spectral = spectral_of(model_in(folder), share_weights=False)
    other = spectral_of(changed(zoo.hf_model("llama")), share_weights=False)
    spectral.load_state_dict(other.state_dict())
    spectral.save_pretrained(folder / "run")
    return spectral, loaded(folder)


def resized(folder: Path) -> tuple[Any, Any]:
    model = model_in(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(zoo.VOCABULARY + 7, mean_resizing=False)
    return saved(folder, model), loaded(folder)


def of_no_folder(folder: Path) -> tuple[Any, Any]:
    return saved(folder, zoo.hf_model("llama")), loaded(folder)


def in_shards(folder: Path) -> tuple[Any, Any]:
    return saved(folder, model_in(folder, max_shard_size="20KB")), loaded(folder)


def in_a_pickle(folder: Path) -> tuple[Any, Any]:
    model_in(folder)
    whole = folder / "model" / "model.safetensors"
    torch.save(zoo.hf_model("llama").state_dict(), folder / "model" / "pytorch_model.bin")
    whole.unlink()
    return saved(folder, from_pretrained(folder / "model")), loaded(folder)


def base_and_save_moved(folder: Path) -> tuple[Any, Any]:
    spectral = saved(folder / "work", model_in(folder / "work"))
    (folder / "work").rename(folder / "moved")
    return spectral, loaded(folder / "moved")


def base_moved(folder: Path) -> tuple[Any, Any]:
    spectral = saved(folder, model_in(folder))
    (folder / "model").rename(folder / "elsewhere")
    return spectral, loaded(folder)


def base_changed_afterwards(folder: Path) -> tuple[Any, Any]:
    spectral = saved(folder, model_in(folder))
    changed(from_pretrained(folder / "model"), 1.001).save_pretrained(folder / "model")
    return spectral, loaded(folder)


def base_gone_before_the_save(folder: Path) -> tuple[Any, Any]:
    spectral = spectral_of(model_in(folder))
    shutil.rmtree(folder / "model")
    spectral.save_pretrained(folder / "run")
    return spectral, loaded(folder)


def in_the_base(folder: Path) -> tuple[Any, Any]:
    spectral = spectral_of(model_in(folder))
    spectral.save_pretrained(folder / "model")
    return spectral, tls.load_model(folder / "model")


def on_another_backend(folder: Path) -> tuple[Any, Any]:
    return saved(folder, model_in(folder)), tls.load_model(folder / "run", backend="hooked")


def file_of(model: Any, folder: Path, base: Any, **options: Any) -> tuple[Any, Any]:
    spectral = spectral_of(model, **options)
    save_spectral(spectral, folder / "spectral.safetensors")
    return spectral, load_spectral(base, folder / "spectral.safetensors")


def wrapped(seed: int = 0) -> Any:
    return zoo.bridge("llama", seed)


def trained_bridge(folder: Path) -> tuple[Any, Any]:
    spectral = spectral_of(wrapped(), share_weights=False)
    with torch.no_grad():
        spectral.blocks[1].mlp.out.weight.mul_(1.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its weights are in no file
        save_spectral(spectral, folder / "spectral.safetensors")
    return spectral, load_spectral(wrapped(), folder / "spectral.safetensors")


def from_scratch(folder: Path, seed: int) -> tuple[Any, Any]:
    base = zoo.hooked("llama")
    spectral = SpectralHookedTransformer(base.cfg)
    spectral.load_state_dict(base.state_dict(), strict=False)
    save_spectral(move(spectral), folder / "spectral.safetensors")
    return spectral, load_spectral(zoo.hooked("llama", seed), folder / "spectral.safetensors")


def whole(seed: int = 0) -> Any:
    spectral = SpectralHookedTransformer(zoo.hooked("llama").cfg)
    spectral.load_state_dict(zoo.hooked("llama", seed).state_dict(), strict=False)
    return move(spectral)


def saved_whole(folder: Path) -> tuple[Any, Any]:
    spectral = whole()
    spectral.save_pretrained(folder / "run")
    return spectral, loaded(folder)


def saved_whole_and_moved(folder: Path) -> tuple[Any, Any]:
    spectral, _ = saved_whole(folder / "work")
    (folder / "work").rename(folder / "moved")
    return spectral, loaded(folder / "moved")


def saved_whole_again(folder: Path) -> tuple[Any, Any]:
    whole(seed=1).save_pretrained(folder / "run")
    return saved_whole(folder)


def saved_whole_to_the_file(folder: Path) -> tuple[Any, Any]:
    spectral, _ = saved_whole(folder)
    return spectral, load_spectral(zoo.hooked("llama"), folder / "run")


def saved_whole_in_another(folder: Path) -> tuple[Any, Any]:
    model_in(folder)
    whole().save_pretrained(folder / "model")
    return whole(), tls.load_model(folder / "model")


OTHER = "other weights"
FOLDERS = [
    Way("base fine-tuned before `to_spectral`", "`load_model`", fine_tuned_before),
    Way("the same", "`load_spectral` on that model", fine_tuned_to_the_file),
    Way("the same", "`load_spectral` on the model of the folder", fine_tuned_to_the_base_of_its_name, OTHER),
    Way("weights trained, then frozen", "`load_model`", frozen_before_the_save),
    Way("base with a merged LoRA", "`load_model`", merged_lora),
    Way("after `load_state_dict` of other weights", "`load_model`", state_dict_loaded),
    Way("resized embeddings", "`load_model`", resized),
    Way("base that came from no folder", "`load_model`", of_no_folder),
    Way("base in shards", "`load_model`", in_shards),
    Way("base in `pytorch_model.bin`", "`load_model`", in_a_pickle),
    Way("as usual", "`load_model`, base and save moved together", base_and_save_moved),
    Way("as usual", "`load_model`, base moved alone", base_moved, "which is not there"),
    Way("as usual", "`load_model`, base changed afterwards", base_changed_afterwards, OTHER),
    Way("base deleted before the save", "`load_model`", base_gone_before_the_save),
    Way("in the folder of the base", "", in_the_base, "is the folder of the base"),
]
HOOKED_WAYS = [
    Way("as usual", '`load_model(backend="hooked")`', on_another_backend),
    Way("HookedTransformer, `save_spectral`", "`load_spectral` on it", lambda at: file_of(*hooked_pair(at, 0))),
    Way("the same", "on one of other weights", lambda at: file_of(*hooked_pair(at, 1)), OTHER),
    Way("the same", "on the bridge", lambda at: file_of(zoo.hooked("llama"), at, wrapped())),
    Way("the same", "on a bridge of other weights", lambda at: file_of(zoo.hooked("llama"), at, wrapped(1)), "off by"),
    Way(
        "`SpectralHookedTransformer`, `save_spectral`", "`load_spectral` on its weights", lambda at: from_scratch(at, 0)
    ),
    Way("the same", "on other weights", lambda at: from_scratch(at, 1), OTHER),
    Way("`SpectralHookedTransformer`, `save_pretrained`", "`load_model`", saved_whole),
    Way("the same", "`load_model`, folder moved", saved_whole_and_moved),
    Way("the same, over an earlier save", "`load_model`", saved_whole_again),
    Way("the same", "`load_spectral` on its weights", saved_whole_to_the_file, "load it by load_model"),
    Way("the same, in the folder of a model", "", saved_whole_in_another, "holds another model"),
]
FILES = [
    Way("bridge, `save_spectral`", "`load_spectral` on it", lambda at: file_of(wrapped(), at, wrapped())),
    Way("the same", "on a bridge of other weights", lambda at: file_of(wrapped(), at, wrapped(1)), OTHER),
    Way("the same", "on the model of transformers", lambda at: file_of(wrapped(), at, zoo.hf_model("llama"))),
    Way("the same, its weights trained too", "on the bridge as it was", trained_bridge, OTHER),
]
WAYS = FOLDERS + FILES + (HOOKED_WAYS if zoo.HAS_HOOKED else [])


def hooked_pair(folder: Path, seed: int) -> tuple[Any, Path, Any]:
    return zoo.hooked("llama"), folder, zoo.hooked("llama", seed)


def largest_change(way: Way, folder: Path) -> float:
    """Largest change of a log-probability: HookedTransformer centres logits, which no probability sees."""
    before, after = way.run(folder)
    if hasattr(after, "run_with_hooks") and not hasattr(before, "run_with_hooks"):
        before = tls.load_model(before, backend="bridge" if hasattr(after, "original_model") else "hooked")
    elif hasattr(before, "run_with_hooks") and not hasattr(after, "run_with_hooks"):
        after = tls.load_model(after)
    found, expected = (logits(model).log_softmax(-1) for model in (after, before))
    return float((found - expected).abs().max())


def main() -> None:
    """Print the table."""
    print("| saved how | loaded how | largest change of a logit |\n|---|---|---|")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = f"{largest_change(way, Path(folder)):.0e}".replace("0e+00", "0")
            except (IncompatibleCheckpoint, OSError):
                found = "refused"
        print(f"| {way.saved} | {way.loaded} | {found} |", flush=True)


if __name__ == "__main__":
    main()
