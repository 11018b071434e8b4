import dataclasses

import pytest

from gatedattn.training import console


@pytest.mark.parametrize(
    "rows, steps, warned",
    [
        (100, 20, False),
        (7, 20, "an epoch has 7 rows and a batch 8"),
        (8, 101, "the data will be read 101 times"),
        (8, 100, False),
    ],
)
def test_data_that_recurs_too_often_is_told(text_config, capsys, rows, steps, warned):
    config = dataclasses.replace(text_config, train=dataclasses.replace(text_config.train, batch_size=8, steps=steps))
    about = dict(device_count=1, device_kind="cpu", process_count=1, platform="cpu", kernel="chunked", kernels_passed_over=[])
    counts = dict.fromkeys(("params_total", "params_active", "params_embedding", "params_gate"), 1000)
    data = {"rows_per_epoch": rows, "tokens_per_epoch": rows * 16, "vocab_size": 257, "unigram_entropy": 3.0}
    console.banner(config, "there", counts, data, about)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(warnings) == bool(warned) and (not warned or warned in warnings[0])
