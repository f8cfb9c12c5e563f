"""Craftax-Classic, with steps that read and write single cells of the map."""
