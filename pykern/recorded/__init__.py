"""Steps of pipelines that other tools have recorded, and their profile."""
