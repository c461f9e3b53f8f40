"""Circuits: which edges carry a behaviour from clean to counterfactual prompts, all of them or some."""
