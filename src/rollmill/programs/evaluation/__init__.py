"""Evaluation: a policy plays a number of whole episodes."""
