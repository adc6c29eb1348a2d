"""What a person sees: tables and progress. Nothing here prints; ``cli`` does."""
