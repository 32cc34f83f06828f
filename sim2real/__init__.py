"""sim2real"""
