"""Operators of the gpt-oss model: public names in `ops`, their specification in `reference`."""
