"""CSV files as spreadsheets of several countries write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbgpu.errors import DataError
from nbgpu.planning.csv_rows import read_csv


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_separators_and_encodings_are_read(tmp_path: Path, delimiter: str, encoding: str) -> None:
    path = tmp_path / "table.csv"
    lines = [("Name", "Zeit"), ("Müller", "3"), ("", ""), (f'"a{delimiter}b"', "4.5")]
    path.write_text("\r\n".join(map(delimiter.join, lines)), encoding=encoding)
    table = read_csv(path)
    assert table.headings == ("Name", "Zeit")
    assert table.rows == (
        (2, {"Name": "Müller", "Zeit": "3"}),
        (4, {"Name": f"a{delimiter}b", "Zeit": "4.5"}),
    )
    assert (table.heading("ZEIT"), table.heading("time")) == ("Zeit", None)


def test_decimal_commas_count_where_commas_do_not_separate(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a;b\n127,5;1.25\n")
    table = read_csv(path)
    assert [table.number(text) for text in ("127,5", "1.25", "1,234,567", "x")] == [127.5, 1.25, None, None]
    path.write_text("a,b\n1,2\n")
    assert read_csv(path).number("127,5") is None


def test_all_that_is_wrong_with_the_shape_of_a_table_is_said(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("time,Time\n127,5,1\n3,4\n5,6,\n7,8,9\n")
    with pytest.raises(DataError) as raised:
        read_csv(path)
    assert str(raised.value).splitlines() == [
        f"{path}: has the heading 'time' twice. Rename one",
        f"{path}: line 2: has more values than the headings",
        f"{path}: line 5: has more values than the headings",
    ]
