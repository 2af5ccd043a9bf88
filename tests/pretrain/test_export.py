"""A real run's model read by transformers, transformers' model trained on by a real run, and what is refused."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from data_pipeline.loader import Batch
from model.config import ModelConfig, from_table
from model.generate import Sampling
from model.huggingface import to_config
from model.transformer import Transformer
from pretrain.__main__ import main
from pretrain.attempt import begin_attempt
from pretrain.checkpoint import find, load_model, load_weights, verify
from pretrain.config import parse_recipe, to_toml
from pretrain.export import export_hf, import_hf
from pretrain.export_gguf import export_gguf
from pretrain.generate import continue_prompts
from pretrain.inputs import Inputs
from pretrain.metrics import read_metrics
from pretrain.run_directory import CheckpointError, RunDirectory
from pretrain.runtime import Ranks
from pretrain.state import TrainState
from pretrain.subject import open_subject
from pretrain.train import loader
from tests.conftest import VOCAB_SIZE
from tests.pretrain.scores import scores_of
from tests.pretrain.test_resume import train_case
from tests.ranks import run_ranks
from tokenizer.codec import Codec, TokenizerError
from tokenizer.export import hf_files
from tokenizer.train import train as train_tokenizer

logging.disable_progress_bar()

Tables = Callable[..., dict[str, Any]]
PADDED = VOCAB_SIZE + 24
ONE_FILE, SHARD = 10**9, 600_000
PROMPT = "It is a truth universally"
FP32 = {"compute": "fp32", "master": "fp32", "accumulate": "fp32"}


def quiet(tables: Tables, **changes: dict[str, Any]) -> dict[str, Any]:
    """A recipe of three steps in fp32 with a padded vocabulary, evaluated and saved at its end alone."""
    fixed: dict[str, dict[str, Any]] = {
        "precision": FP32,
        "schedule": {"max_steps": 3},
        "evaluation": {"every_steps": 100},
        "checkpoint": {"every_steps": 100},
        "model": {"vocab_size": PADDED},
    }
    return tables(**{name: {**fixed.get(name, {}), **changes.get(name, {})} for name in {**fixed, **changes}})


@pytest.fixture(scope="module")
def finished_run(tiny_recipe: Tables, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run"
    assert run_ranks(1, train_case, quiet(tiny_recipe, schedule={"max_steps": 8}), path) == ["finished"]
    return path


@pytest.fixture(scope="module")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "deep" / "model"
    export_hf(finished_run, out, dtype=None, max_shard_bytes=SHARD)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    return out


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command line, without the seconds that a process of its own takes: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pretrain", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        written = capfd.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return run


def opened(folder: Path) -> LlamaForCausalLM:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert info == {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
    assert isinstance(model, LlamaForCausalLM)
    return model.eval()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- out


def test_transformers_continues_a_prompt_alike(finished_run: Path, exported: Path) -> None:
    """Its loader, its tokenizer, its generate: equal logits, and equal text for as long as the window has room."""
    ours, theirs, tokenizer = load_model(finished_run), opened(exported), AutoTokenizer.from_pretrained(exported)
    assert theirs.config.vocab_size == PADDED
    ids_bt = torch.tensor([[tokenizer.eos_token_id, *tokenizer(PROMPT).input_ids]])
    with torch.no_grad():
        assert float((ours(ids_bt) - theirs(ids_bt).logits).abs().max()) <= 1e-5
    produced = theirs.generate(ids_bt, do_sample=False, max_new_tokens=48)[0, ids_bt.shape[1] :].tolist()
    if produced[-1] == tokenizer.eos_token_id:
        produced.pop()
    greedy = Sampling(temperature=0.0)
    ((_, text),) = continue_prompts(open_subject(finished_run), [PROMPT], greedy, max_new_tokens=48, seed=1)
    assert text == tokenizer.decode(produced)
    assert text


def test_the_command_says_what_it_wrote(finished_run: Path, exported: Path, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "x"
    code, text, errors = command("export", finished_run, "--out", out, "--max-shard-bytes", "0.6MB", "--json")
    assert (code, errors) == (0, "")
    report = json.loads(text)
    assert report["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    assert (report["vocab_size"], report["tokenizer_vocab_size"]) == (PADDED, VOCAB_SIZE)
    assert contents(out) == contents(exported)
    _, text, _ = command("export", finished_run, "--out", out, "--overwrite")
    assert f"{report['parameters']:,} parameters in float32" in text
    assert "1,048 is padded: the tokenizer gives 1,024 ids" in text
    code, text, errors = command("import", exported, "--out", tmp_path / "y")
    assert (code, errors) == (0, "")
    table = tomllib.loads(text[text.index("initial_weights") :])
    assert table["initial_weights"] == str(tmp_path / "y")
    assert from_table(table["model"]) == load_weights(tmp_path / "y")[0]
    assert command("export", tmp_path / "y", "--format", "gguf", "--out", tmp_path / "y.gguf")[0] == 0
    assert (tmp_path / "y.gguf").read_bytes()[:4] == b"GGUF"


def test_the_files_say_what_transformers_and_servers_read(exported: Path, tokenizer: Path) -> None:
    codec = Codec.load(tokenizer)
    config, generation = (
        json.loads((exported / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    assert LlamaConfig(**config).architectures == ["LlamaForCausalLM"]
    assert (config["torch_dtype"], config["dtype"], config["tie_word_embeddings"]) == ("float32", "float32", True)
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [codec.bos_id, codec.eos_id, codec.pad_id]
    assert generation == {
        "bos_token_id": codec.eos_id,  # where documents begin in training
        "eos_token_id": codec.eos_id,
        "pad_token_id": codec.pad_id,
        "suppress_tokens": list(range(VOCAB_SIZE, PADDED)),
    }
    assert "lm_head.weight" not in json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]


def test_ids_that_pad_the_vocabulary_are_never_chosen(exported: Path, finished_run: Path, tmp_path: Path) -> None:
    """Their rows are made the likeliest; transformers' generate, told nothing, passes them over as ours does."""
    shutil.copytree(exported, tmp_path / "x")
    (file,) = (
        file for file in (tmp_path / "x").glob("*.safetensors") if "model.embed_tokens.weight" in load_file(file)
    )
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][VOCAB_SIZE:] = 3 * tensors["model.embed_tokens.weight"][:24]
    save_file(tensors, file, metadata={"format": "pt"})
    model = opened(tmp_path / "x")
    ids_bt = torch.arange(4, 44).view(4, 10)
    with torch.no_grad():
        assert (model(ids_bt).logits.argmax(-1) >= VOCAB_SIZE).any()
    assert int(model.generate(ids_bt, do_sample=False, max_new_tokens=8, eos_token_id=None).max()) < VOCAB_SIZE


def test_another_dtype_is_a_rounding(finished_run: Path, tmp_path: Path) -> None:
    _, weights = load_weights(find(finished_run))
    for dtype, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        report = export_hf(finished_run, tmp_path / dtype, dtype=dtype, max_shard_bytes=ONE_FILE)
        assert report.dtype == json.loads((tmp_path / dtype / "config.json").read_text())["dtype"]
        stored = load_file(tmp_path / dtype / "model.safetensors")
        assert torch.equal(stored["model.norm.weight"], weights["norm.weight"].to(kind))
        assert opened(tmp_path / dtype).dtype == kind


def test_a_weight_that_fp16_cannot_hold_is_named(finished_run: Path, tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    export_hf(finished_run, tmp_path / "x", dtype=None, max_shard_bytes=ONE_FILE)
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    tensors["model.norm.weight"][3] = 7e4
    save_file(tensors, tmp_path / "x" / "model.safetensors", metadata={"format": "pt"})
    import_hf(tmp_path / "x", imported, tokenizer=None, rope_layout="rotate_half")
    with pytest.raises(CheckpointError, match=r"norm.weight holds 7e.04, which fp16 can't: choose --dtype bf16"):
        export_hf(imported, tmp_path / "y", dtype="fp16", max_shard_bytes=ONE_FILE)
    assert not (tmp_path / "y").exists()


# ---------------------------------------------------------------- in and back


def test_export_of_an_import_is_the_export(exported: Path, tmp_path: Path) -> None:
    """Byte for byte, every file, through the other RoPE layout too; and what is imported is a whole checkpoint."""
    for layout in ("rotate_half", "interleaved"):
        report, config = import_hf(exported, tmp_path / layout, tokenizer=None, rope_layout=layout)
        assert config.rope_layout == layout == json.loads((tmp_path / layout / "model.json").read_text())["rope_layout"]
        assert report.files == {name: len(content) for name, content in contents(tmp_path / layout).items()}
        verify(tmp_path / layout)
        export_hf(tmp_path / layout, tmp_path / f"{layout} back", dtype=None, max_shard_bytes=SHARD)
        assert contents(tmp_path / f"{layout} back") == contents(exported)


def theirs(tmp_path: Path, tokenizer: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """What transformers' save_pretrained writes of an untied model that it drew itself, a tokenizer of ours beside."""
    config = ModelConfig(
        vocab_size=PADDED, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=256, seq_len=64,
        norm_eps=1e-5, tied=False, rope_base=5e5,
    )  # fmt: skip
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(**to_config(replace(config, **sizes), dtype))).to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    for name, content in hf_files(tokenizer)[0].items():
        (tmp_path / "theirs" / name).write_bytes(content)
    return tmp_path / "theirs"


def first_step(tables: dict[str, Any]) -> list[Batch]:
    inputs = Inputs.check(parse_recipe(tables), 1)
    with closing(loader(inputs, Ranks(0, 0, 1), TrainState())) as batches:
        return [next(batches) for _ in range(inputs.plan.gradient_accumulation_steps)]


def test_training_goes_on_from_their_weights(tiny_recipe: Tables, tokenizer: Path, tmp_path: Path) -> None:
    """The first loss is transformers' loss of the same batch; the run resumes, and is read by transformers again.

    Stored in bf16, trained in fp32: the loss is that of the stored weights.
    """
    folder, imported = theirs(tmp_path, tokenizer, torch.bfloat16), tmp_path / "imported"
    _, config = import_hf(folder, imported, tokenizer=tokenizer, rope_layout="rotate_half")
    tables = {
        **quiet(tiny_recipe, schedule={"max_steps": 2, "warmup_steps": 0, "peak_lr": 5e-3, "min_lr": 5e-3}),
        "model": {**config.to_dict(), "init_std": 0.5},
        "initial_weights": str(imported),
    }
    assert run_ranks(2, train_case, tables, tmp_path / "run") == ["finished", "finished"]

    model = opened(folder).float()
    batches = first_step(tables)
    inputs, targets = (
        torch.cat([torch.from_numpy(np.asarray(one)) for one in ones])
        for ones in ([batch.inputs for batch in batches], [batch.targets for batch in batches])
    )
    with torch.no_grad():
        expected = float(F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()))
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["attempts"][0]["initial_weights"] == str(imported)

    shutil.rmtree(imported)  # a run that resumes has weights of its own
    tables["schedule"] = {**tables["schedule"], "max_steps": 4}
    assert run_ranks(2, train_case, tables, tmp_path / "run") == ["finished", "finished"]
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    export_hf(tmp_path / "run", tmp_path / "out", dtype=None, max_shard_bytes=ONE_FILE)
    ours, again = load_model(tmp_path / "run"), opened(tmp_path / "out")
    with torch.no_grad():
        assert float((ours(inputs) - again(inputs).logits).abs().max()) <= 1e-5


def test_imported_weights_are_evaluated_and_continue_prompts(
    finished_run: Path, exported: Path, collection: Path, command: Command, tmp_path: Path
) -> None:
    imported = tmp_path / "imported"
    import_hf(exported, imported, tokenizer=None, rope_layout="rotate_half")
    scores = [
        scores_of(path, collection, batch_size=8, max_tokens=512)["all"].loss for path in (imported, finished_run)
    ]
    assert scores[0] == scores[1]
    texts = [
        list(continue_prompts(open_subject(path), [PROMPT], Sampling(temperature=0.0), max_new_tokens=9, seed=1))
        for path in (imported, finished_run)
    ]
    assert texts[0] == texts[1]
    refused(command("evaluate", imported), "give --data")


# ---------------------------------------------------------------- GGUF


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_gguf_holds_the_model_as_llama_cpp_reads_it(dtype: str, finished_run: Path, tmp_path: Path) -> None:
    """Read by gguf's own reader and put into a model of the interleaved layout: the same logits; and the tokenizer."""
    out = tmp_path / "deep" / "x.gguf"
    export_gguf(finished_run, out, dtype=dtype)
    ours, codec = load_model(finished_run), Codec.load(finished_run / "tokenizer")
    config, reader = ours.config, gguf.GGUFReader(out)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    sizes = {
        "context_length": config.seq_len, "embedding_length": config.d_model, "block_count": config.n_layers,
        "feed_forward_length": config.d_ff, "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim,
        "vocab_size": VOCAB_SIZE,
    }  # fmt: skip
    assert {name: fields[f"llama.{name}"] for name in sizes} == sizes
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config.norm_eps)
    assert fields["llama.rope.freq_base"] == config.rope_base
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.tokens"] == [codec.piece(token) for token in range(codec.vocab_size)]
    assert fields["tokenizer.ggml.bos_token_id"] == fields["tokenizer.ggml.eos_token_id"] == codec.eos_id
    assert (fields["tokenizer.ggml.add_bos_token"], fields["tokenizer.ggml.add_space_prefix"]) == (True, False)
    kinds = fields["tokenizer.ggml.token_type"]
    assert [kinds.count(kind) for kind in gguf.TokenType] == [VOCAB_SIZE - 260, 1, 3, 0, 0, 256]

    tensors = {
        tensor.name: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in reader.tensors
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.n_layers)
    other = Transformer(replace(config, rope_layout="interleaved", vocab_size=VOCAB_SIZE))
    weights = {
        name: tensors.pop(f"{names.get_name('model.' + name.removesuffix('.weight'))}.weight")
        for name, _ in other.named_parameters()
    }
    assert not tensors
    other.load_state_dict(weights, strict=False)
    ids_bt = torch.arange(60).view(2, 30)
    with torch.no_grad():
        difference = (other(ids_bt) - ours(ids_bt)[..., :VOCAB_SIZE]).abs().max()
    assert float(difference) <= {"fp32": 1e-5, "bf16": 0.1, "fp16": 0.01}[dtype]


def test_a_gguf_is_replaced_only_when_asked(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    export_gguf(finished_run, out, dtype=None)
    content = out.read_bytes()
    with pytest.raises(CheckpointError, match=r"is there already; .*--overwrite"):
        export_gguf(finished_run, out, dtype=None)
    export_gguf(finished_run, out, dtype=None, overwrite=True)
    assert out.read_bytes() == content
    (tmp_path / "mine").write_text("mine")
    for path, words in ((tmp_path / "mine", "is no GGUF file"), (tmp_path, "is no file")):
        with pytest.raises(CheckpointError, match=words):
            export_gguf(finished_run, path, dtype=None, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"x.gguf", "mine"}


# ---------------------------------------------------------------- what is refused


def refused(done: tuple[int, str, str], *words: str) -> None:
    code, text, errors = done
    assert (code, text, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("error: ")
    for word in words:
        assert word in errors, (word, errors)


def test_faults_of_an_import_are_one_line_and_leave_nothing(tokenizer: Path, command: Command, tmp_path: Path) -> None:
    """On the command line the kinds of a fault; each of a kind is tested where it is found (tests/model)."""
    folder, out = theirs(tmp_path, tokenizer), tmp_path / "out"
    arguments = ("import", folder, "--out", out)
    refused(command(*arguments), "holds no tokenizer", "--tokenizer")
    config, weights = (folder / "config.json").read_text(), (folder / "model.safetensors").read_bytes()
    given = (*arguments, "--tokenizer", tokenizer)
    (folder / "model.safetensors").write_bytes(weights[:-1000])
    refused(command(*given), "model.safetensors is cut short or damaged")
    (folder / "config.json").write_text(config.replace('"hidden_size": 128', '"hidden_size": 256'))
    (folder / "model.safetensors").write_bytes(weights)
    refused(command(*given), "model.embed_tokens.weight is 1048 x 128, by config.json it is 1048 x 256")
    (folder / "config.json").write_text(config.replace("LlamaForCausalLM", "MistralForCausalLM"))
    refused(command(*given), "config.json", "MistralForCausalLM")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_weights_alone_are_not_put_among_the_checkpoints_of_a_run(
    exported: Path, finished_run: Path, command: Command
) -> None:
    before = sorted((finished_run / "checkpoints").iterdir())
    out = finished_run / "checkpoints" / "step-00000099"
    refused(command("import", exported, "--out", out), "among the checkpoints of a run", "initial_weights")
    assert sorted((finished_run / "checkpoints").iterdir()) == before


def test_faults_of_a_config_file_and_a_tokenizer_are_told(tokenizer: Path, tmp_path: Path) -> None:
    folder, out = theirs(tmp_path, tokenizer, vocab_size=600), tmp_path / "out"

    def fails(words: str, error: type[ValueError] = CheckpointError, given: Path | None = tokenizer) -> None:
        with pytest.raises(error, match=words) as caught:
            import_hf(folder, out, tokenizer=given, rope_layout="rotate_half")
        assert "\n" not in str(caught.value)

    fails("gives ids up to 1023, the model in .* knows 600")
    fails("no such tokenizer folder", TokenizerError, tmp_path / "absent")
    for content in ("", "[]", "[" * 100_000):
        (folder / "config.json").write_text(content)
        fails(r"config.json (is no JSON|holds no JSON object): name the folder")
    (folder / "config.json").unlink()
    fails("config.json is missing")
    assert not out.exists()


def test_faults_of_an_export_are_one_line(finished_run: Path, exported: Path, command: Command, tmp_path: Path) -> None:
    export = ("export", finished_run, "--out")
    refused(command("export", tmp_path / "absent", "--out", tmp_path / "x"), "absent does not exist")
    refused(command(*export, exported), "holds a model already", "--overwrite")
    refused(command(*export, tmp_path / "x", "--max-shard-bytes", "5"), "--max-shard-bytes", "unit")
    refused(command(*export, tmp_path / "x", "--dtype", "int4"), "--dtype")
    gguf_shards = (*export, tmp_path / "x", "--format", "gguf", "--max-shard-bytes", "1GB")
    refused(command(*gguf_shards), "--max-shard-bytes: a GGUF is one file")
    assert list(tmp_path.iterdir()) == []


def test_only_an_export_is_overwritten(finished_run: Path, exported: Path, tokenizer: Path, tmp_path: Path) -> None:
    def export(out: Path) -> None:
        export_hf(finished_run, out, dtype=None, max_shard_bytes=ONE_FILE, overwrite=True)

    folder = theirs(tmp_path, tokenizer)  # with the names of an export, and someone else's
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "training.md").unlink()
    for occupied in (folder, tmp_path / "tokenizer"):
        before = contents(occupied)
        with pytest.raises(TokenizerError, match="holds files that are no model's; choose another --out"):
            export(occupied)
        assert contents(occupied) == before
    shutil.copytree(exported, tmp_path / "x")
    export(tmp_path / "x")
    assert not list((tmp_path / "x").glob("model-*"))  # the shards of before are gone
    opened(tmp_path / "x")


def test_a_full_disk_leaves_nothing(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, *arguments: Any, **options: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pretrain.export.write_weights", full)
    with pytest.raises(TokenizerError, match=r"x: can't be written \(No space left on device\)"):
        export_hf(finished_run, tmp_path / "x", dtype=None, max_shard_bytes=ONE_FILE)

    def short(self: gguf.GGUFWriter, *arguments: Any, **options: Any) -> None:
        raise OSError("73728 requested and 71504 written")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", short)
    with pytest.raises(CheckpointError, match=r"x: can't be written \(73728 requested.*is the disk full"):
        export_gguf(finished_run, tmp_path / "x", dtype=None)
    assert list(tmp_path.iterdir()) == []


def begin(tables: dict[str, Any], run: Path, resume: str = "auto") -> Path | None:
    """What a run does before its first step, on its first rank: where its initial weights come from."""
    _, _, initial = begin_attempt(RunDirectory(run), Inputs.check(parse_recipe(tables), 1), resume, [1], print)
    return initial


def test_a_run_from_other_weights_is_refused_before_it_begins(
    exported: Path, tiny_recipe: Tables, tmp_path: Path
) -> None:
    imported, runs = tmp_path / "imported", tmp_path / "runs"
    import_hf(exported, imported, tokenizer=None, rope_layout="interleaved")
    tables = {**quiet(tiny_recipe), "initial_weights": str(imported)}

    def fails(words: str, resume: str = "auto", **changes: Any) -> None:
        with pytest.raises(CheckpointError, match=words) as caught:
            begin({**tables, **changes}, runs / words[:9], resume)
        assert "\n" not in str(caught.value)
        assert not list(runs.rglob("recipe.toml"))

    def sizes(**changes: Any) -> dict[str, Any]:
        return {**tables["model"], "rope_layout": "interleaved", **changes}

    fails('rope_layout = "interleaved", the recipe\'s has "rotate_half".*--rope-layout rotate_half')
    fails("n_layers = 2, the recipe's has 3: set model.n_layers = 2", model=sizes(n_layers=3))
    fails("absent does not exist", initial_weights=str(tmp_path / "absent"))
    fails("without a state of training.*initial_weights", str(imported), model=sizes())
    weights = (imported / "weights.safetensors").read_bytes()
    (imported / "weights.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    fails("weights.safetensors is damaged", model=sizes())
    (imported / "weights.safetensors").write_bytes(weights)
    assert begin({**tables, "model": sizes(seq_len=32)}, runs / "x") == imported


def test_a_plan_checks_the_initial_weights(
    exported: Path, tiny_recipe: Tables, command: Command, tmp_path: Path
) -> None:
    imported, recipe = tmp_path / "imported", tmp_path / "recipe.toml"
    import_hf(exported, imported, tokenizer=None, rope_layout="rotate_half")
    recipe.write_text(to_toml(parse_recipe({**quiet(tiny_recipe), "initial_weights": str(imported)})))
    code, text, errors = command("plan", recipe, "--check-data")
    assert (code, errors) == (0, "")
    assert f"initial weights from {imported}, checked" in text
    for change, words in (("initial_weights=nowhere", "nowhere does not exist"), ("model.n_layers=3", "n_layers = 2")):
        assert command("plan", recipe, "--set", change)[0] == 0
        refused(command("plan", recipe, "--check-data", "--set", change), words)


def test_a_run_does_not_resume_in_the_other_layout(finished_run: Path, tiny_recipe: Tables, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    tables = quiet(tiny_recipe, schedule={"max_steps": 8}, model={"rope_layout": "interleaved"})
    with pytest.raises(CheckpointError, match=r"model.rope_layout = rotate_half, this run has interleaved"):
        begin(tables, tmp_path / "run")


def test_a_run_may_start_from_the_newest_weights_of_another(
    finished_run: Path, tiny_recipe: Tables, tmp_path: Path
) -> None:
    tables = {**quiet(tiny_recipe), "initial_weights": str(finished_run)}
    assert begin(tables, tmp_path / "run") == finished_run / "checkpoints" / "step-00000008"


def test_weights_of_another_tokenizer_are_refused(
    exported: Path, tiny_recipe: Tables, tmp_path: Path, corpus: Path
) -> None:
    texts = [json.loads(line)["text"] for line in (corpus / "code.jsonl").open(encoding="utf-8")]
    train_tokenizer(texts, tmp_path / "other", vocab_size=600)
    import_hf(exported, tmp_path / "imported", tokenizer=tmp_path / "other", rope_layout="rotate_half")
    tables = {**quiet(tiny_recipe), "initial_weights": str(tmp_path / "imported")}
    with pytest.raises(CheckpointError, match=r"go with the tokenizer.*prepare the data with --tokenizer"):
        begin(tables, tmp_path / "run")
