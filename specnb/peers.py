"""Other engines beside ours: each in a process and an environment of its own, asked the same prompts as token ids.

This file is both ends. Imported, it is `Peer`, which starts a worker and asks it. Run under another interpreter, which
needs no specnb (``python specnb/peers.py llama-cpp --model FILE …``), it is the worker. They speak JSON, a line each:

    worker:     {"ready": "llama-cpp-python 0.3.9"}            or {"error": "not installed: …"}
    benchmark:  {"ids": [1, 2], "max_new_tokens": 64, "temperature": 0, "seed": 1, "eos": [2]}
    worker:     {"tokens": [5, 2], "seconds": 0.61, "first_seconds": 0.1}

The worker's own clock counts, so the pipe costs the engine nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

LOOKUP_TOKENS = 10  # as in transformers' and specnb's prompt lookup
LOOKUP_NGRAM = 3
SETTLE = 0.3  # seconds after an answer in which an engine's idle threads may still spin

Reply = dict[str, Any]


class PeerError(RuntimeError):
    """A peer cannot take part, or no longer; the message is the reason, for a report."""


class Peer:
    """An engine in another interpreter.

    Args:
        engine: one of `ENGINES`; its name in the report.
        python: the interpreter of the environment that it is installed in.
        weights: a file or folder for the engine to load; None means the benchmark's model, converted if need be.
        script: the worker, for tests.
    """

    def __init__(
        self,
        engine: str,
        python: str | os.PathLike[str],
        weights: str | os.PathLike[str] | None = None,
        script: str | os.PathLike[str] = __file__,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"There is no peer {engine!r}. There is: {', '.join(ENGINES)}.")
        self.name, self.python, self.weights, self.script = engine, os.fspath(python), weights, os.fspath(script)
        self.version, self.settle = "", SETTLE
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def start(self, weights: str | os.PathLike[str], dtype: str, context: int, threads: int) -> None:
        """Start the worker and wait until it has loaded the weights.

        Raises:
            PeerError: if the interpreter or the engine is not there, or loading fails.
        """
        command = [self.python, self.script, self.name, "--model", os.fspath(weights), "--dtype", dtype]
        command += ["--context", str(context), "--threads", str(threads)]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `close`
        try:  # a session of its own: Ctrl-C is for the benchmark, which then closes its peers
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PeerError(f"not installed: {self.python} cannot be run ({error.strerror})") from error
        self.version = str(self._hear()["ready"])

    def ask(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int, eos: list[int]) -> Reply:
        """One answer: ``tokens``, ``seconds`` and ``first_seconds``.

        Raises:
            PeerError: if the worker has failed.
        """
        assert self._process is not None and self._process.stdin is not None
        request = dict(ids=ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, eos=eos)
        with contextlib.suppress(BrokenPipeError):  # whoever has died says nothing, which `_hear` reports
            print(json.dumps(request), file=self._process.stdin, flush=True)
        reply = self._hear()
        time.sleep(self.settle)
        return reply

    def _hear(self) -> Reply:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            reply = json.loads(line)
        except ValueError:
            raise PeerError(f"it stopped working ({self._last_words()})") from None
        if "error" in reply:
            raise PeerError(str(reply["error"]))
        return reply

    def _last_words(self) -> str:
        assert self._process is not None and self._log is not None
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}"

    def close(self) -> None:
        """End the worker."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


# --- the worker's side: nothing below may need specnb ---

# An engine answers one request: an iterator of token ids, the first of which arrives when it is there.
Engine = Callable[[Reply], Iterator[int]]


def llama_cpp(options: argparse.Namespace) -> tuple[str, Engine]:
    """llama.cpp through llama-cpp-python; a GGUF file."""
    import llama_cpp  # type: ignore[import-not-found]
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # type: ignore[import-not-found]

    lookup = options.engine.endswith("-lookup")
    draft = LlamaPromptLookupDecoding(max_ngram_size=LOOKUP_NGRAM, num_pred_tokens=LOOKUP_TOKENS) if lookup else None
    model = llama_cpp.Llama(
        options.model, n_ctx=options.context, n_threads=options.threads, n_threads_batch=options.threads,
        draft_model=draft, logits_all=lookup, verbose=False,
    )  # fmt: skip

    def answer(request: Reply) -> Iterator[int]:
        model.reset()  # else it would keep what it knows of the same prompt from before
        model.set_seed(request["seed"])
        plain = dict(top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
        yield from model.generate(request["ids"], temp=request["temperature"], **plain)

    return f"llama-cpp-python {llama_cpp.__version__}", answer


def vllm(options: argparse.Namespace) -> tuple[str, Engine]:
    """vLLM; a folder or Hub id."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB; it would take half of the memory
    import vllm  # type: ignore[import-not-found]

    lookup = {"method": "ngram", "num_speculative_tokens": LOOKUP_TOKENS, "prompt_lookup_max": LOOKUP_NGRAM}
    model = vllm.LLM(
        options.model, dtype=options.dtype, max_model_len=options.context, enable_prefix_caching=False,
        max_num_seqs=1, gpu_memory_utilization=0.4,
        speculative_config=lookup if options.engine.endswith("-lookup") else None,
    )  # fmt: skip

    def answer(request: Reply) -> Iterator[int]:
        how = vllm.SamplingParams(
            temperature=request["temperature"], max_tokens=request["max_new_tokens"], seed=request["seed"],
            stop_token_ids=request["eos"], detokenize=False,
        )  # fmt: skip
        (out,) = model.generate({"prompt_token_ids": request["ids"]}, how, use_tqdm=False)
        yield from out.outputs[0].token_ids

    return f"vLLM {vllm.__version__}", answer


def _preload_openmp() -> None:
    """Start again with Intel's OpenMP loaded first, if its package brought that: vLLM's advice for processors."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, [sys.executable, *sys.argv])


ENGINES: dict[str, Callable[[argparse.Namespace], tuple[str, Engine]]] = {
    "llama-cpp": llama_cpp,
    "llama-cpp-lookup": llama_cpp,
    "vllm": vllm,
    "vllm-lookup": vllm,
}


def timed(answer: Engine, request: Reply) -> Reply:
    """The answer up to an end token or the limit, and its times. An engine that hands over all at once has no first."""
    started = time.perf_counter()
    tokens: list[int] = []
    first = 0.0
    for token in answer(request):
        first = first or time.perf_counter() - started
        tokens.append(int(token))
        if token in request["eos"] or len(tokens) >= request["max_new_tokens"]:
            break
    seconds = time.perf_counter() - started
    return {"tokens": tokens, "seconds": seconds, "first_seconds": first if first < 0.9 * seconds else None}


def work(arguments: list[str]) -> None:
    """Load the engine, then answer line by line until there is no more."""
    reader = argparse.ArgumentParser()
    reader.add_argument("engine")
    for name in ("--model", "--dtype"):
        reader.add_argument(name)
    for name in ("--context", "--threads"):
        reader.add_argument(name, type=int)
    options = reader.parse_args(arguments)
    if options.engine.startswith("vllm"):
        _preload_openmp()
    say = _speaker()
    try:
        version, answer = ENGINES[options.engine](options)
    except ImportError as error:
        say({"error": f"not installed: {error}"})
        return
    say({"ready": version})
    for line in sys.stdin:
        say(timed(answer, json.loads(line)))


def _speaker() -> Callable[[Reply], None]:
    """A function that sends a line; whatever else prints to stdout from now on goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda reply: print(json.dumps(reply), file=pipe, flush=True)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != here]  # else specnb's modules shadow
    work(sys.argv[1:])
    os._exit(0)  # an engine's threads may not end by themselves, and nobody would be left to end them
