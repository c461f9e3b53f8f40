"""Query-key and output-value operators of heads, norm-folded and factored, their self-check, a penalty on a part."""
