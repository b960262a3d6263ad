"""The work of each action on tensors, and the run of a step. No schedule is known by name here."""
