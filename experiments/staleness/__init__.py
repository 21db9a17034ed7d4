"""The map: what staleness costs, by the movement of the policy in a step and by objective.

Unlike ``experiments.convergence`` it runs no service. Each step trains on responses of the policy that is exactly
``lag`` steps old, so staleness is a parameter, and a seed gives the same numbers with the same libraries.
"""
