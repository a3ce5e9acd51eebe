"""The HTTP server: OpenAI's completions, served by one engine. FastAPI is imported by `app` alone."""
