"""tritonserver's side of the engine, and the `gptoss` command line."""
