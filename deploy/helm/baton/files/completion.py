"""Requests one completion, as a client would. The arguments are the router's URL and a timeout in
seconds; if an API key is required, the third one is the path of the file that has it. Exits with 1
and the reason if there is no answer."""

import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

url, seconds = sys.argv[1], float(sys.argv[2])
key = Path(sys.argv[3]).read_text().strip() if len(sys.argv) > 3 else ""

# The router's certificate is for its external names, so it is not verified here.
unverified = ssl.create_default_context()
unverified.check_hostname = False
unverified.verify_mode = ssl.CERT_NONE


def ask(path: str, body: dict[str, object] | None = None) -> dict:
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    context = unverified if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(request, timeout=seconds, context=context) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{path}: {error.code}: {error.read(2000).decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{url}{path} can't be reached: {error}")


model = ask("/v1/models")["data"][0]["id"]
asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
answer = ask("/v1/completions", asked)
choice, usage = answer["choices"][0], answer["usage"]
if not choice["text"] or not 0 < usage["completion_tokens"] <= 16:
    sys.exit(f"no answer: {json.dumps(answer)}")
print(f"{model}: {choice['text']!r} ({usage['completion_tokens']} tokens)")
