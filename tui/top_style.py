"""Where the panels stand in each of the three layouts: normal, wide and narrow; and one panel alone."""

from __future__ import annotations

CSS = """
Screen { layout: vertical; }

#header, #footer, #filter, #scrub { height: 1; }
#filter { border: none; padding: 0; display: none; background: $panel; }
#filter.open { display: block; }
#footer { background: $panel; color: $foreground; }

#pair { height: 8; }
#kv { width: 1fr; margin-right: 2; }
#rates { width: 38; }
#steps { height: 7; }
#gauges { height: 3; display: none; }
#requests { height: 1fr; }

.wide #pair { height: 14; }
.wide #rates { width: 46; }
.wide #steps { height: 10; }

.narrow #pair, .narrow #steps { display: none; }
.narrow #gauges { display: block; }

.only #gauges, .only #pair, .only #kv, .only #rates, .only #steps, .only #requests { display: none; }
.only-requests #requests { display: block; }
.only-kv #pair, .only-rates #pair { display: block; height: 1fr; }
.only-kv #kv { display: block; margin-right: 0; }
.only-rates #rates { display: block; width: 1fr; }
.only-steps #steps { display: block; height: 1fr; }

/* Opaque: to see the dashboard through it would mean to draw both, which makes keys wait. */
Sheet, EnginePicker { align: center middle; background: $background; }
#sheet {
    width: 100%;
    max-width: 100;
    height: 100%;
    max-height: 32;
    border: round $accent;
    border-title-color: $text-accent;
    padding: 0 1;
}
#sheet-text { height: 1fr; }
"""
