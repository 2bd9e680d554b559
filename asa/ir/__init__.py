"""The nouns: frozen, keyword-only records that every other room speaks in. No torch, no behaviour beyond laws."""
