"""What GPU time costs: dollars a million tokens at a price an hour of one GPU."""

DEFAULT_GPU_PRICE = 3.0  # dollars an hour


def dollars_per_million(
    seconds: float, num_tokens: float, num_gpus: int, gpu_price: float
) -> float:
    """Of tokens that took so long on so many GPUs; gpu_price is dollars an hour of one."""
    return seconds * num_gpus * gpu_price / 3600 / num_tokens * 1e6
