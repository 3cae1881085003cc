"""The Harmony chat format: chat to tokens (`render`), tokens to channels (`stream`)."""
