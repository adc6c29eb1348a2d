"""What is asked of a planner (a request on a graph), and what it answers: a plan, its file and its advice.

Not here: how plans are found (``search``, ``planners``). No TensorFlow.
"""
