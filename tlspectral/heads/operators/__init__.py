"""Query-key and output-value operators of heads as thin factors; their check against the model's scores; a training
penalty.
"""
