"""The engine: token ids in, token ids out. It knows nothing of chat, text or tritonserver."""
