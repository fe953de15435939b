"""vLLM's side of a comparison, run by the interpreter that has it: one turn at a time, a line of JSON each way.

    in   {"model": …, "dtype": …, "seed": …, "max_model_len": …, "max_num_seqs": …, "threads": …}  then, each time,
         {"prompts": [[ids], …], "settings": [{…}, …]}
    out  {"ready": {"vllm": …, "torch": …, "transformers": …}}                       then, for each,
         {"tokens": [[ids], …]}, or {"error": …}

It ends with its input. Knows: vLLM. Refuses to know: our packages, which its environment does not have.
"""

import importlib
import json
import os
import sys
from typing import Any, TextIO

_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_SETTINGS |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Unless the user says otherwise. The engine runs in this very process, which spares it a hop for every token."""
_PACKAGES = ("vllm", "torch", "transformers")


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")  # standard output is for answers alone; what vLLM prints goes to the log
    os.dup2(2, 1)
    wishes = json.loads(sys.stdin.readline())
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(wishes.pop("threads"))  # read once, when torch is imported
    try:
        engine = _engine(wishes)
    except Exception as error:  # vLLM raises what it likes for a model or a memory that it cannot use
        _say(answers, {"error": _told(error)})
        raise
    _say(answers, {"ready": {name: importlib.import_module(name).__version__ for name in _PACKAGES}})
    for line in sys.stdin:
        try:
            _say(answers, {"tokens": _tokens(engine, json.loads(line))})
        except Exception as error:
            _say(answers, {"error": _told(error)})


def _engine(wishes: dict[str, Any]) -> Any:
    vllm = importlib.import_module("vllm")
    # Prompts come once, but for a warm-up; its defaults, such as penalties, are a model's own.
    return vllm.LLM(enable_prefix_caching=False, generation_config="vllm", **wishes)


def _tokens(engine: Any, asked: dict[str, Any]) -> list[list[int]]:
    vllm = importlib.import_module("vllm")
    settings = [vllm.SamplingParams(detokenize=False, **one) for one in asked["settings"]]
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    outputs = engine.generate(prompts, settings, use_tqdm=False)
    return [[int(token) for token in output.outputs[0].token_ids] for output in outputs]


def _told(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _say(answers: TextIO, document: dict[str, Any]) -> None:
    answers.write(json.dumps(document) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
