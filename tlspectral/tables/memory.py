"""The check that a table file does not fill memory when it is read."""

import os
from operator import mul
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

# A table that is larger than both in memory was made to fill it: a row with one measured number takes some 8 bytes of
# the file, so that it would need 4,000 bytes, or 500 columns.
_MEMORY, _GROWTH = 2**30, 500


def require_memory(path: str | os.PathLike[str], data: bytes, file: pq.ParquetFile) -> None:
    """Refuse a file whose table would take far more memory than any table that was measured. The table is not read."""
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    chunks = [(group, group.column(index)) for group in groups for index in range(group.num_columns)]
    rows = [max(group.num_rows, chunk.num_values) for group, chunk in chunks]
    sizes = [chunk.total_uncompressed_size for _, chunk in chunks]
    size = sum(max(8 * count, stored) for count, stored in zip(rows, sizes, strict=True))
    most = max(_MEMORY, _GROWTH * len(data))
    texts = [field.name for field in file.schema_arrow if field.type in (pa.string(), pa.large_string(), pa.binary())]
    if size <= most < sum(map(mul, rows, sizes)) and texts:
        # A text is stored once and may be repeated in every row: read without repeating it.
        compute: Any = pc  # its functions are made when it is imported
        encoded = pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts).read(columns=texts)
        for chunk in (chunk for column in encoded.columns for chunk in column.chunks):
            lengths = compute.binary_length(chunk.dictionary)
            size += compute.sum(lengths.take(chunk.indices)).as_py() or 0
    if size > most:
        raise ValueError(
            f"{path} has {len(data):,} bytes and its table would take some {size:,} in memory, more than {_GROWTH} "
            "times as many, as no table of measured numbers does: it is damaged or forged; write the table again"
        )
