"""GuideLLM, a benchmark of servers. Its tokenizer would come from the hub; a small one is made here."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import MODEL, URL, call, main
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(tempfile.mkdtemp(prefix="aimgpu-guidellm-"))


def _tokenizer() -> str:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{number}": number for number in range(1, 200)}}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(FOLDER / "tokenizer")
    return str(FOLDER / "tokenizer")


@call
def benchmark() -> None:
    report = FOLDER / "report.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "benchmark", "--target", URL, "--model", MODEL]
    command += ["--rate-type", "synchronous", "--max-requests", "2", "--processor", _tokenizer(), "--disable-progress"]
    command += ["--data", "prompt_tokens=8,output_tokens=4,samples=2", "--output-path", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    requests = json.loads(report.read_text())["benchmarks"][0]["request_totals"]
    assert (requests["successful"], requests["errored"]) == (2, 0)


if __name__ == "__main__":
    main()
