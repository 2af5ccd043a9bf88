from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest

from pretrain import __main__ as command_line
from pretrain.config import PROJECT_ROOT, RecipeError, load_recipe, parse_recipe, to_toml
from pretrain.device_memory import GB, MB, DeviceMemory, described
from pretrain.device_presets import DEVICES_GB, RANKS
from pretrain.fit import Search, first_fit, needed, relief, shortest_changes, too_big
from pretrain.fit_cost import Choice, Layout, Numerics, recomputed_share, seconds_per_token
from pretrain.fit_found import Need
from pretrain.memory import Budget, Part, budget
from pretrain.resolve import read_json, resolve
from tests.pretrain.recipe import recipe

HALF_B = load_recipe(PROJECT_ROOT / "pretrain" / "recipes" / "0.5b.toml")
NONE = load_recipe(
    PROJECT_ROOT / "pretrain" / "recipes" / "0.5b.toml", ["memory.activation_checkpointing=none"]
)  # the 0.5b with its activations kept: much to save
SHALLOW = load_recipe(
    PROJECT_ROOT / "pretrain" / "recipes" / "0.5b.toml", ["memory.activation_checkpointing=none", "model.n_layers=4"]
)


def gpu(total_bytes):
    return described(int(total_bytes))


# ---------------------------------------------------------------- what is needed


def test_a_need_is_peak_process_and_fragmentation():
    parts = (
        Part("a", 100 * MB, "", moments=("forward", "step")),
        Part("b", 300 * MB, "", moments=("forward",)),
        Part("c", 350 * MB, "", moments=("step",)),
        Part("d", 200 * MB, "", place="host", moments=("step",)),
        Part("e", 10 * MB, "", place="host", moments=("saving",)),
    )
    on_gpu, on_cpu = Need.of(Budget(parts), "cuda"), Need.of(Budget(parts), "cpu")
    assert (on_gpu.peak_bytes, on_gpu.moment, on_gpu.host_bytes) == (450 * MB, "step", 200 * MB)
    assert on_gpu.total_bytes == 450 * MB + GB + 22_500_000
    # on a CPU there is one memory: what is offloaded lies in it
    assert (on_cpu.peak_bytes, on_cpu.moment, on_cpu.host_bytes) == (650 * MB, "step", 0)
    assert on_gpu.fits(DeviceMemory("cuda", on_gpu.total_bytes, "x", 200 * MB))
    assert not on_gpu.fits(DeviceMemory("cuda", on_gpu.total_bytes - 1, "x", 200 * MB))
    assert not on_gpu.fits(DeviceMemory("cuda", on_gpu.total_bytes, "x", 200 * MB - 1))


# ---------------------------------------------------------------- the cost model


def test_checkpointing_computes_again_what_it_says():
    full = recomputed_share(HALF_B, "full")
    assert recomputed_share(HALF_B, "none") == 0
    assert recomputed_share(HALF_B, "every-2") == pytest.approx(full / 2)
    assert recomputed_share(HALF_B, "every-18") == pytest.approx(full / 18)
    # the blocks' forward pass, by hand: 2 FLOPs a weight and 4·heads·head_dim a key, of three times both and the head
    keys = 4 * 18 * 12 * 128 * 2049 / 2
    blocks = 2 * 18 * (6_291_456 + 18_874_368) + keys
    assert full == pytest.approx(blocks / (3 * (blocks + 2 * 49_152_000)), rel=1e-6)
    assert 0 < recomputed_share(HALF_B, "selective") < recomputed_share(HALF_B, "every-2")


def choice(path="ds_configs/zero2.json", micro=8, mode="full", **offload):
    return Choice(micro, mode, replace(Layout.read(path), **offload), Numerics(0, ()))


def seconds(one, ranks=8):
    return seconds_per_token(HALF_B, one, ranks, "bf16")


def test_the_cost_model_puts_changes_in_their_order():
    plain = seconds(choice())
    for slower in (choice(micro=4), choice(micro=1)):
        assert seconds(slower) > plain
    assert seconds(choice(mode="none")) < seconds(choice(mode="every-2")) < plain
    stages = [seconds(choice(f"ds_configs/zero{stage}.json")) for stage in range(4)]
    assert stages[1] < stages[2] < stages[3]
    w, g = 2 * 502_193_664, 4 * 502_193_664
    micro, step = 8 * 2048, 256 * 2048 / 8
    volumes = [2 * g / step, (g + w) / step, g / micro + w / step, (g + 2 * w) / micro]
    assert [one - seconds(choice(), ranks=1) for one in stages] == pytest.approx([v * 7 / 8 / 25e9 for v in volumes])
    assert len({seconds(choice(f"ds_configs/zero{stage}.json"), ranks=1) for stage in range(4)}) == 1
    # the higher the stage, the dearer a small micro-batch
    dearer = [
        seconds(choice(f"ds_configs/zero{s}.json", 1)) / seconds(choice(f"ds_configs/zero{s}.json")) for s in (1, 2, 3)
    ]
    assert dearer == sorted(dearer)
    offloaded = [
        seconds(choice("ds_configs/zero3.json", **places))
        for places in ({}, {"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"},
                       {"optimizer": "nvme", "parameters": "cpu"}, {"optimizer": "nvme", "parameters": "nvme"})
    ]  # fmt: skip
    assert offloaded == sorted(offloaded)
    assert len(set(offloaded)) == 5


def test_offloading_and_numerics_come_before_time():
    search = Search(HALF_B, 8, "cuda", "bf16")
    slow = choice("ds_configs/zero3.json", micro=1)
    summed = replace(choice(mode="none"), numerics=search.numerics[1])
    offloaded = choice(mode="none", optimizer="cpu")
    assert search.cost(slow)[2] > max(search.cost(summed)[2], search.cost(offloaded)[2])
    assert search.cost(slow) < search.cost(summed) < search.cost(offloaded)
    assert [one.layout.offload_level for one in (
        choice(), choice(optimizer="cpu"), choice(optimizer="cpu", parameters="cpu"), choice(optimizer="nvme"),
        choice(optimizer="cpu", parameters="nvme"),
    )] == [0, 1, 2, 3, 4]  # fmt: skip
    assert [one.values for one in search.numerics] == [
        (),
        (("accumulate", "bf16"),),
        (("master", "bf16"), ("compensation", "kahan")),
        (("accumulate", "bf16"), ("master", "bf16"), ("compensation", "kahan")),
    ]
    fp32 = recipe(precision={"compute": "fp32"})
    assert len(Search(fp32, 1, "cuda", "fp32").numerics) == 1


# ---------------------------------------------------------------- the searches


SMALL_STEP = load_recipe(
    PROJECT_ROOT / "pretrain" / "recipes" / "0.5b.toml",
    ["memory.activation_checkpointing=none", "model.seq_len=512", "deepspeed.config=ds_configs/zero1.json",
     "batch.global_batch_size=2", "batch.micro_batch_size=2"],
)  # fmt: skip


def test_a_step_in_one_micro_batch_may_need_least():
    """Two would leave sums in fp32 beside the second."""
    search = Search(SMALL_STEP, 1, "cuda", "bf16")
    own = search.propose(Choice(2, "none", search.own, search.numerics[0], asynchronous=True))
    apart = search.propose(Choice(1, "none", search.own, search.numerics[0], asynchronous=True))
    assert own is not None
    assert apart is not None
    assert own.need.total_bytes < apart.need.total_bytes
    memory = gpu(own.need.total_bytes)
    assert search.first_fit(memory).chosen is own
    everything = [one for one in map(search.propose, search.choices(only_less=False)) if one is not None]
    nothing = search.first_fit(gpu(GB)).smallest
    assert nothing.need.total_bytes == min(one.need.total_bytes for one in everything)
    shortest, least = shortest_changes(SMALL_STEP, 1, gpu(GB), "bf16", resumable=True)
    assert shortest is None
    assert least is not None
    assert least.choice.micro_batch_size == 2


@pytest.mark.parametrize("config", [HALF_B, NONE], ids=["full", "none"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_whatever_is_proposed_runs_fits_and_keeps_the_batch(config, ranks):
    own = needed(config, ranks, "cuda", "bf16")
    search = Search(config, ranks, "cuda", "bf16")
    seen = set()
    for share in (0.97, 0.7, 0.45):
        memory = gpu(own.total_bytes * share)
        for proposal in (search.shortest_changes(memory)[0], search.first_fit(memory).chosen):
            if proposal is None:
                continue
            seen.add(share)
            assert proposal.changes
            changed = parse_recipe(tomllib.loads(to_toml(proposal.config)))
            assert needed(changed, ranks, "cuda", "bf16") == proposal.need
            assert proposal.need.total_bytes <= memory.total_bytes
            told = resolve(read_json(PROJECT_ROOT / changed.deepspeed.config), changed, ranks)
            assert told["train_batch_size"] == config.batch.global_batch_size
            assert told["gradient_accumulation_steps"] == proposal.accumulation_steps
            assert (changed.seed, changed.schedule, changed.data) == (config.seed, config.schedule, config.data)
    assert 0.97 in seen


def test_the_shortest_list_is_shortest_and_its_first_entry_cheapest():
    search = Search(NONE, 8, "cuda", "bf16")
    # what alone comes first in the order, by hand: the size of the recipe with one change each
    own = needed(NONE, 8, "cuda", "bf16").total_bytes
    proposal, _ = shortest_changes(NONE, 8, gpu(own - 1), "bf16")
    assert proposal is not None
    assert len(proposal.changes) == 1
    alone = [
        one
        for one in search.choices(only_less=True)
        if search.count(one) == 1 and not one.numerics.level and not one.layout.offload_level
    ]
    fitting = [one for one in map(search.propose, alone) if one is not None and one.need.total_bytes < own]
    assert proposal.seconds_per_token == min(one.seconds_per_token for one in fitting)
    small, _ = shortest_changes(NONE, 8, gpu(min(one.need.total_bytes for one in fitting) - 1), "bf16")
    assert small is not None
    assert len(small.changes) == 2
    costs = [search.cost(Choice(8, "none", search.own, numerics)) for numerics in search.numerics]
    assert costs == sorted(costs)


def test_what_fits_needs_no_change():
    memory = gpu(141 * GB)
    assert too_big(NONE, 8, memory, needed(NONE, 8, "cuda", "bf16"), "bf16") is None
    fit = first_fit(HALF_B, 8, memory, "bf16")
    assert fit.chosen is not None
    assert "fits" in first_fit(fit.chosen.config, 8, memory, "bf16").to_text()
    assert first_fit(fit.chosen.config, 8, memory, "bf16").chosen.changes == ()


@pytest.mark.parametrize(
    "model",
    [
        {"preset": "classic"},
        {"preset": "gpt2"},
        {"attention": "mla", "n_kv_heads": 8, "mla_latent": 128, "mla_rope_dim": 32},
        {"residual": "hyper", "n_streams": 4, "qk_norm": True, "sliding_window": 256},
    ],
    ids=["classic", "gpt2", "mla", "streams"],
)
def test_whatever_the_components_what_fits_is_found(model):
    config = recipe(model=model)
    need = needed(config, 2, "cuda", "bf16")
    memory = gpu(need.total_bytes - 0.2 * need.peak_bytes)
    chosen = first_fit(config, 2, memory, "bf16").chosen
    assert chosen is not None
    assert chosen.changes
    assert needed(chosen.config, 2, "cuda", "bf16") == chosen.need
    assert chosen.need.fits(memory)


def test_streams_and_latents_need_more_and_fewer_matrices_less():
    """Of two ranks of `mini`, beside the training state."""

    def activations_of(**model):
        config = recipe(model=model)
        deepspeed = resolve(read_json(PROJECT_ROOT / "ds_configs" / "zero2.json"), config, 2, "bf16")
        held = budget(config, deepspeed, 2, compute="bf16", device="cuda")
        return held.at("forward") - held.static_bytes

    plain = activations_of(n_kv_heads=8)
    assert activations_of(residual="hyper", n_streams=4, n_kv_heads=8) > 2 * plain
    assert activations_of(attention="mla", n_kv_heads=8, mla_latent=128, mla_rope_dim=32) > 1.2 * plain
    assert activations_of(ffn="gelu", n_kv_heads=8) < activations_of(ffn="swiglu", n_kv_heads=8)
    assert activations_of(ffn="relu", n_kv_heads=8) < activations_of(ffn="gelu", n_kv_heads=8)


def test_the_order_tried_is_by_cost_and_each_is_smaller():
    search = Search(HALF_B, 8, "cuda", "bf16")
    fit = search.first_fit(gpu(6 * GB))
    assert fit.chosen is not None
    costs = [search.cost(one.choice) for one in fit.tried]
    assert costs == sorted(costs)
    sizes = [one.need.total_bytes for one in fit.tried]
    assert sizes == sorted(sizes, reverse=True)
    assert fit.tried[-1] is fit.chosen
    assert len(fit.tried) > 3


def test_nothing_cheaper_would_fit():
    """By looking at every configuration, whatever it needs with a smaller micro-batch."""
    search = Search(recipe(model={"n_layers": 2}), 2, "cuda", "bf16")
    everything = [one for one in map(search.propose, search.choices(only_less=False)) if one is not None]
    sizes = sorted({one.need.total_bytes for one in everything})
    for total in (sizes[0] - 1, sizes[0], sizes[len(sizes) // 10], sizes[len(sizes) // 2], sizes[-1]):
        fitting = [one for one in everything if one.need.total_bytes <= total]
        chosen = search.first_fit(gpu(total)).chosen
        assert (chosen is None) == (not fitting)
        if chosen is not None:
            assert search.cost(chosen.choice) == min(search.cost(one.choice) for one in fitting)


def test_no_shorter_list_would_fit():
    """Nor a quicker one that is as short."""
    search = Search(SHALLOW, 8, "cuda", "bf16")

    def order(one):
        offload, numerics, seconds = search.cost(one)
        return offload, numerics, search.count(one), seconds

    less = [one for one in map(search.propose, search.choices(only_less=True)) if one is not None]
    for total in sorted({one.need.total_bytes for one in less})[::12]:
        shortest, _ = search.shortest_changes(gpu(total))
        assert shortest is not None
        assert order(shortest.choice) == min(order(one.choice) for one in less if one.need.total_bytes <= total)


def test_a_micro_batch_that_divides_is_found_where_the_recipes_own_does_not():
    """64 ranks leave 4 sequences each of 256, the recipe's micro-batch is 8."""
    with pytest.raises(RecipeError, match="not a multiple"):
        needed(HALF_B, 64, "cuda", "bf16")
    fit = first_fit(HALF_B, 64, gpu(24 * GB), "bf16")
    assert fit.chosen is not None
    assert fit.chosen.choice.micro_batch_size in (1, 2, 4)
    ramped = recipe(batch={"ramp": [{"until_samples": 120, "global_batch_size": 24}]})
    assert Search(ramped, 2, "cuda", "bf16").micro_batch_sizes(32) == [4, 2, 1]  # divides 32 / 2 and 24 / 2


def test_absurd_batches_are_searched_as_quickly():
    many = 2**4 * 3**3 * 5**2 * 7 * 11 * 13  # has 480 divisors
    own = {"global_batch_size": many, "micro_batch_size": 2 * 3 * 5 * 7 * 11}
    sizes = Search(recipe(batch=own), 1, "cuda", "bf16").micro_batch_sizes(many)
    assert 12 <= len(sizes) <= 26
    assert {1, own["micro_batch_size"], many} <= {*sizes}
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert all(many % size == 0 for size in sizes)
    huge = {"global_batch_size": 2**31 - 1, "micro_batch_size": 2**31 - 1}  # a prime number
    config = recipe(batch=huge)
    assert Search(config, 1, "cuda", "bf16").micro_batch_sizes(2**31) == [2**31 - 1, 1]
    line = too_big(config, 1, gpu(24 * GB), needed(config, 1, "cuda", "bf16"), "bf16")
    assert line is not None
    assert "set batch.micro_batch_size = 1, then" in line


def test_what_is_refused_is_never_proposed():
    """ZeRO-0 cannot sum in fp32, compiled blocks go with neither ZeRO-3 nor "selective"."""
    compiled = load_recipe(PROJECT_ROOT / "pretrain" / "recipes" / "0.5b.toml", ["compile=true"])
    search = Search(compiled, 8, "cuda", "bf16")
    proposed = [one for choice in search.choices(only_less=False) for one in search.least_of_kind(choice)]
    assert {one.choice.layout.stage for one in proposed} == {0, 1, 2}
    for one in proposed:
        assert one.choice.layout.stage != 3
        assert one.choice.checkpointing != "selective"
        assert one.choice.layout.stage != 0 or one.config.precision.accumulate == "bf16"


# ---------------------------------------------------------------- what is said


def test_the_line_names_need_device_and_changes():
    need = needed(NONE, 8, "cuda", "bf16")
    memory = DeviceMemory("cuda", need.total_bytes - 1, "a device of the test")
    line = too_big(NONE, 8, memory, need, "bf16")
    proposal, _ = shortest_changes(NONE, 8, memory, "bf16")
    assert line is not None
    assert proposal is not None
    assert line.startswith(f"does not fit: a rank needs {need.total_bytes / GB:.2f} GB (the predicted peak ")
    assert "(a device of the test): set " in line
    assert proposal.to_text() in line
    assert "\n" not in line


def test_where_nothing_helps_the_line_says_so():
    tiny = DeviceMemory("cuda", GB, "x")
    line = too_big(HALF_B, 1, tiny, needed(HALF_B, 1, "cuda", "bf16"), "bf16")
    assert line is not None
    assert ": even with " in line
    assert "use more ranks or a larger device" in line
    little = DeviceMemory("cuda", 6 * GB, "x", 3 * GB)  # main memory for no optimizer of one rank
    fit = first_fit(HALF_B, 1, little, "bf16")
    assert fit.chosen is None
    assert fit.enough_ranks is not None
    assert first_fit(HALF_B, fit.enough_ranks, little, "bf16").chosen is not None
    assert f"or {fit.enough_ranks} ranks with one such device each" in fit.failure()
    # more ranks do not help where all share one memory
    assert "ranks with" not in first_fit(HALF_B, 1, DeviceMemory("cpu", GB, "x"), "bf16").failure()


def test_main_memory_may_be_what_lacks():
    need = needed(HALF_B, 8, "cuda", "bf16")
    memory = DeviceMemory("cuda", 80 * GB, "x", need.host_bytes - 1)
    line = too_big(HALF_B, 8, memory, need, "bf16")
    assert line is not None
    assert "of main memory and has" in line


def test_toml_and_overrides_say_the_same():
    proposal, _ = shortest_changes(NONE, 8, gpu(0.3 * needed(NONE, 8, "cuda", "bf16").total_bytes), "bf16")
    assert proposal is not None
    path = PROJECT_ROOT / "pretrain" / "recipes" / "0.5b.toml"
    overrides = ["memory.activation_checkpointing=none", *proposal.to_overrides()]
    assert load_recipe(path, overrides) == proposal.config
    told = tomllib.loads(proposal.to_toml())
    assert {f"{table}.{key}": value for table, lines in told.items() for key, value in lines.items()} == dict(
        proposal.values
    )
    json.dumps(proposal.to_dict())


def test_relief_prefers_what_a_checkpoint_resumes_under():
    change, resumes = relief(NONE, 2, "cuda", "bf16", 2 * GB)
    assert change is not None
    assert resumes
    now = needed(NONE, 2, "cuda", "bf16").total_bytes
    assert change.need.total_bytes <= now - 2 * GB
    assert {key for key, _ in change.values} <= {"batch.micro_batch_size", "memory.activation_checkpointing"}
    least = load_recipe(PROJECT_ROOT / "pretrain" / "recipes" / "0.5b.toml", ["batch.micro_batch_size=1"])
    other, resumes = relief(least, 2, "cuda", "bf16", GB)
    assert other is not None
    assert not resumes
    assert relief(least, 2, "cuda", "bf16", 100 * GB) == (None, True)


def test_relief_takes_the_copy_of_asynchronous_saving_first():
    """It costs no step anything, and every checkpoint goes on without."""
    copying = needed(HALF_B, 2, "cpu", "bf16")
    change, resumes = relief(HALF_B, 2, "cpu", "bf16", GB)
    assert resumes
    assert change is not None
    assert change.to_text() == "checkpoint.asynchronous = false"
    assert change.need.peak_bytes < copying.peak_bytes - 4 * GB
    assert not parse_recipe(tomllib.loads(to_toml(change.config))).checkpoint.asynchronous


def test_relief_names_nothing_that_saves_next_to_nothing():
    """A micro-batch of 1 instead of 2, where nearly all is state: less, and no help."""
    config = recipe(
        model={"seq_len": 16},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        memory={"activation_checkpointing": "full"},
        deepspeed={"config": "ds_configs/zero3.json"},
    )
    now = needed(config, 1, "cpu", "bf16").total_bytes
    _, least = shortest_changes(config, 1, DeviceMemory("cpu", 1, "x"), "bf16", resumable=True)
    assert least is not None
    assert 0.95 * now < least.need.total_bytes < now
    assert relief(config, 1, "cpu", "bf16", 100 * GB) == (None, True)


# ---------------------------------------------------------------- the published table


def test_the_table_of_devices_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain", "plan", "pretrain/recipes/0.5b.toml", "--presets"])
    monkeypatch.chdir(PROJECT_ROOT)
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert not ended.value.code
    printed = capsys.readouterr().out.strip()
    rows = printed.splitlines()[2:]
    assert len(rows) == len(DEVICES_GB) * len(RANKS)
    document = (PROJECT_ROOT / "docs" / "device-presets.md").read_text(encoding="utf-8")
    published = "\n".join(line for line in document.splitlines() if line.startswith("|"))
    assert published == printed
