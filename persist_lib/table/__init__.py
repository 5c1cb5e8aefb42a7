"""The front door: tables that remember, whatever carries them."""
