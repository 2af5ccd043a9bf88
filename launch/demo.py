"""The main job end to end, by the commands a user would type: `python -m launch demo`, or `make demo`.

Every step is a command of its own, shown before it runs. In the middle of training one rank is killed with SIGKILL,
between two checkpoints, and the same command is started again. The losses of the steps that ran twice are compared bit
for bit, and so is every step with a second run of the same recipe that is never interrupted (and stopped when it has
gone past the kill: it has nothing more to show).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.devices import visible_gpus
from launch.errors import LaunchError

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "pretrain/recipes/demo.toml"
CORPUS = "data_pipeline/sample_corpus"
LANGUAGES = ("english", "chinese", "code")
TOKENIZER = "data/demo-tokenizer"
DATA = "data/demo"
RUN = "runs/make-demo"
UNINTERRUPTED = "runs/make-demo-uninterrupted"
PROMPTS = {"english": "It is a truth universally", "chinese": "子曰：", "code": "static int "}
KILL_AFTER_STEP = 215
PROMISED_GAIN = 0.7  # nats per token below the unigram entropy, on held-out text


class Demo:
    """The steps, and the facts they leave for the table at the end."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.facts: list[tuple[str, str]] = []
        gpus = len(visible_gpus(os.environ))
        self.ranks = min(gpus, 2) or 2  # two; on a machine with a single GPU one, since each rank needs its own

    def run(self) -> bool:
        """All of it; True if everything held that the demo promises."""
        os.chdir(ROOT)
        started = time.monotonic()
        for folder in (TOKENIZER, DATA, RUN, UNINTERRUPTED):
            shutil.rmtree(folder, ignore_errors=True)
        self.build_tokenizer()
        self.prepare_data()
        self.train_killed_and_resumed()
        replayed_equal = self.compare_with_uninterrupted()
        gain_reached = self.evaluate()
        self.generate()
        self.note("time", f"{time.monotonic() - started:.0f} s in all, set-up not counted")
        table = Table("what", "figure", title="Zerohalf demo", title_justify="left")
        for what, figure in self.facts:
            table.add_row(what, figure)
        self.console.print(table)
        return replayed_equal and gain_reached

    # ------------------------------------------------------------ the steps

    def build_tokenizer(self) -> None:
        self.heading("1/6 tokenizer: SentencePiece BPE, 4096 pieces, from three kinds of text")
        inputs = [word for language in LANGUAGES for word in ("--input", f"{CORPUS}/{language}.jsonl")]
        self.command("tokenizer", "train", *inputs, "--vocab-size", "4096", "--out", TOKENIZER)

    def prepare_data(self) -> None:
        self.heading("2/6 shards: one data set a language, train and validation")
        inputs = [word for name in LANGUAGES for word in ("--input", f"{name}={CORPUS}/{name}.jsonl")]
        options = ("--tokenizer", TOKENIZER, "--out", DATA, "--validation-fraction", "0.05")
        self.command("data_pipeline", "prepare", *inputs, *options)
        self.command("data_pipeline", "verify", DATA, "--full")

    def train_killed_and_resumed(self) -> None:
        self.heading(f"3/6 training on {self.ranks} ranks under DeepSpeed, killed behind step {KILL_AFTER_STEP}")
        plan = json.loads(self.captured("pretrain", "plan", RECIPE, "--world-size", str(self.ranks), "--json"))
        self.note("model", f"{plan['parameters']:,} parameters, {plan['total_tokens']:,} tokens to learn from")
        code = self.watched(self.training(RUN), RUN, KILL_AFTER_STEP, self.kill_a_rank)
        if code == 0:
            raise LaunchError(f"{RUN} ended as if well although a rank was killed")
        self.heading("4/6 the same command again")
        self.command(*self.training(RUN))

    def compare_with_uninterrupted(self) -> bool:
        """Whether replayed steps and uninterrupted steps have the very same losses."""
        self.say(f"a second run of the same recipe, never interrupted, to somewhat past step {KILL_AFTER_STEP}")
        self.watched(self.training(UNINTERRUPTED), UNINTERRUPTED, KILL_AFTER_STEP + 5, self.ask_to_stop)
        first = losses(RUN, attempt=1)
        second = losses(RUN, attempt=2)
        undisturbed = losses(UNINTERRUPTED, attempt=1)
        replayed = sorted(first.keys() & second.keys())
        equal = [step for step in replayed if first[step] == second[step] == undisturbed[step]]
        everywhere = [step for step in undisturbed if {**first, **second}[step] == undisturbed[step]]
        holds = bool(replayed) and equal == replayed and len(everywhere) == len(undisturbed)
        self.note(
            "killed and resumed",
            f"steps {replayed[0]} to {replayed[-1]} ran twice, {len(equal)} of {len(replayed)} losses equal, "
            "bit for bit"
            if replayed
            else "no step ran twice: the kill came at a checkpoint",
        )
        self.note(
            "never interrupted", f"{len(everywhere)} of {len(undisturbed)} losses equal to that run's, bit for bit"
        )
        return holds

    def evaluate(self) -> bool:
        """Whether the model is as far below the unigram entropy as promised."""
        self.heading("5/6 evaluation on held-out text")
        scores = json.loads(self.captured("pretrain", "evaluate", RUN, "--json"))["scores"]
        for source, score in scores.items():
            loss = (
                f"loss {score['loss']:.3f} nats/token (unigram {score['unigram']:.3f}, uniform {score['uniform']:.3f})"
            )
            figures = f"{loss}, perplexity {score['perplexity']:.1f}, {score['bits_per_byte']:.3f} bits/byte"
            self.say(f"{source}: {figures}")
            self.note(f"held-out {source}", figures)
        self.say("unigram: the entropy of these very tokens' frequencies; for 'all', of the three languages' together")
        gains = {source: score["unigram"] - score["loss"] for source, score in scores.items()}
        listed = ", ".join(f"{source} {gain:.3f}" for source, gain in gains.items())
        self.note("below unigram", f"{listed} nats per token; promised: {PROMISED_GAIN} over all the text")
        return bool(gains["all"] >= PROMISED_GAIN)

    def generate(self) -> None:
        self.heading("6/6 generation, with the KV cache")
        prompts = [word for prompt in PROMPTS.values() for word in ("--prompt", prompt)]
        output = self.captured("pretrain", "generate", RUN, *prompts, "--temperature", "0.5", "--json")
        for language, line in zip(PROMPTS, output.splitlines(), strict=True):
            written = json.loads(line)
            self.say(f"{language}: {written['prompt']}{written['continuation']}")
            self.note(f"writes {language}", " ".join(f"{written['prompt']}{written['continuation']}".split())[:100])

    # ------------------------------------------------------------ how a step is done

    def training(self, run: str) -> tuple[str, ...]:
        return ("launch", "run", RECIPE, "--ranks", str(self.ranks), "--run", run)

    def command(self, *words: str) -> None:
        """Run a command with its output shown. LaunchError if it fails."""
        argv = self.show(*words)
        code = subprocess.run(argv, check=False).returncode
        if code != 0:
            raise LaunchError(f"`python -m {shlex.join(words)}` ended with code {code}; its output stands above")

    def captured(self, *words: str) -> str:
        """What a command prints. LaunchError if it fails."""
        done = subprocess.run(self.show(*words), stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise LaunchError(f"`{shlex.join(words)}` ended with code {done.returncode}; its output stands above")
        return done.stdout

    def watched(self, words: tuple[str, ...], run: str, step: int, act: Callable[[str], None]) -> int:
        """Run a training command, and call `act(run)` once when it has recorded `step`; returns the exit code."""
        process = subprocess.Popen(self.show(*words))
        acted = False
        while (code := process.poll()) is None:
            if not acted and max(losses(run, attempt=1), default=0) >= step:
                act(run)
                acted = True
            time.sleep(0.05)
        if not acted:
            raise LaunchError(f"{run} ended with code {code} before step {step}; its output stands above")
        return code

    def kill_a_rank(self, run: str) -> None:
        pid = json.loads(Path(run, "environment.json").read_text())["attempts"][-1]["pids"][-1]
        self.say(f"SIGKILL to the last rank, process {pid}; that the run now fails is what is shown here")
        os.kill(pid, signal.SIGKILL)

    def ask_to_stop(self, run: str) -> None:
        Path(run, "stop").touch()

    def show(self, *words: str) -> list[str]:
        self.console.print(f"$ python -m {shlex.join(words)}", style="bold", markup=False, soft_wrap=True)
        return [sys.executable, "-m", *words]

    def heading(self, text: str) -> None:
        self.console.rule(text, align="left")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def note(self, what: str, figure: str) -> None:
        self.facts.append((what, figure))


def losses(run: str, *, attempt: int) -> dict[int, float]:
    """The loss of every training step that one attempt of a run has recorded."""
    path = Path(run, "metrics.jsonl")
    if not path.exists():
        return {}
    whole_lines = path.read_text().split("\n")[:-1]
    records = [json.loads(line) for line in whole_lines]
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train" and r["attempt"] == attempt}
