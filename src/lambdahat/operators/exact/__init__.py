"""Exact traces and diagonals of curvature matrices in closed form, with the checks that decide
where the closed forms apply.
"""
