"""Stage by stage: what each may return, steps with every stage recorded, and hundreds of them beside the reference."""
