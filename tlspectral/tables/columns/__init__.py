"""The column dictionary: what every column of every table means, and what it does not establish.

`heads` has the columns of the head table and of `frequency_table`, `every_table` all tables by name; the other files
are families of tables.
"""
