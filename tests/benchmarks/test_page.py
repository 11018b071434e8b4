"""benchmarks/README.md shows what benchmarks/results holds."""

import benchmarks.__main__ as page


def test_the_tables_are_those_of_the_results():
    text = page.PAGE.read_text()
    assert page.render(text) == text, "the results have changed: python -m benchmarks --render"
    for name in page.RUNS:
        assert text.count(f"<!-- {name} -->") == 1
        missing = f"<!-- {name} -->\nNot measured yet." in text
        assert missing != (page.FOLDER / "results" / f"{name}.json").exists(), f"python -m benchmarks --only={name}"
