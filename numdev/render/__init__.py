"""What a person sees. Renderers read a report and compute no measurement."""
