"""Describe frames and series of pandas by their columns, and put them together again.

Frames with several levels of names, with categories or time zones, or with an index of dates are pickled:
pandas has too many kinds of columns to describe each.
"""

from __future__ import annotations

import sys
from typing import Any


def described(value: Any) -> dict[str, Any] | None:
    """Return the parts of a DataFrame or Series, as arrays and lists; None for any other value, and if a part
    has a kind that is not described here."""
    pandas = sys.modules.get("pandas")
    if pandas is None or type(value) not in (pandas.DataFrame, pandas.Series):
        return None
    index = _labels(pandas, value.index)
    if type(value) is pandas.Series:
        column = _column(value)
        if index is None or column is None or value.attrs:
            return None
        return {"kind": "series", "index": index, "column": column, "name": value.name}
    names = _labels(pandas, value.columns)
    columns = [_column(value.iloc[:, number]) for number in range(value.shape[1])]
    if index is None or names is None or None in columns or value.attrs:
        return None
    return {"kind": "frame", "index": index, "names": names, "columns": columns}


def rebuilt(table: dict[str, Any]) -> Any:
    """Return the DataFrame or Series of a description."""
    import pandas as pd

    index = _index(pd, table["index"])
    if table["kind"] == "series":
        return _series(pd, table["column"], index).rename(table["name"])
    names = _index(pd, table["names"])
    # By number at first, because two columns may have the same name.
    columns = {number: _series(pd, column, index) for number, column in enumerate(table["columns"])}
    frame = pd.DataFrame(columns, index=index)
    frame.columns = names
    return frame


def _column(series: Any) -> dict[str, Any] | None:
    """Return the values of a column as an array, or as a list if they are texts or objects; None for other
    dtypes."""
    dtype = series.dtype
    if getattr(dtype, "kind", "") in "biufcmM" and hasattr(dtype, "itemsize") and not hasattr(dtype, "tz"):
        array = series.to_numpy()
        return {"array": array} if array.dtype == dtype else None
    if str(dtype) in ("object", "str"):
        return {"values": series.astype(object).tolist(), "dtype": str(dtype)}
    return None


def _series(pandas: Any, column: dict[str, Any], index: Any) -> Any:
    if "array" in column:
        return pandas.Series(column["array"], index=index)
    return pandas.Series(column["values"], index=index, dtype=column["dtype"])


def _labels(pandas: Any, index: Any) -> dict[str, Any] | None:
    """Return the labels of a plain index. None for an index of dates, times, categories or intervals, or of
    several levels: what has such an index is pickled."""
    if type(index) is pandas.RangeIndex:
        return {"range": [index.start, index.stop, index.step], "name": index.name}
    if type(index) is not pandas.Index:
        return None
    column = _column(index.to_series())
    return None if column is None else {**column, "name": index.name}


def _index(pandas: Any, labels: dict[str, Any]) -> Any:
    """Return the index of its description."""
    if "range" in labels:
        start, stop, step = labels["range"]
        return pandas.RangeIndex(start, stop, step, name=labels["name"])
    if "array" in labels:
        return pandas.Index(labels["array"], name=labels["name"])
    return pandas.Index(labels["values"], dtype=labels["dtype"], name=labels["name"])
