"""An OpenAI-compatible HTTP gateway in front of the ensemble `gpt_oss`, over gRPC.

`serving.py` runs it, `app.py` has its routes; `chat.py`, `completions.py` and `responses.py` turn
OpenAI's JSON into the ensemble's inputs and its replies into OpenAI's JSON, without a server;
`ensemble.py` is the client, `exchange.py` one HTTP request from its body to its last byte.
"""
