//! Terminal tables in one style.

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, TableComponent, presets};

/// Width when stdout is no terminal.
const DEFAULT_WIDTH: u16 = 120;

/// A table with `columns` as its head. A head that starts with `>` is right-aligned.
pub fn table(columns: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_style(TableComponent::HeaderLines, '─').set_style(TableComponent::MiddleHeaderIntersections, '─');
    if !table.is_tty() {
        table.set_width(DEFAULT_WIDTH);
    }
    table.set_header(columns.iter().map(|c| Cell::new(c.trim_start_matches('>'))));
    for (i, column) in columns.iter().enumerate() {
        if let Some(c) = table.column_mut(i).filter(|_| column.starts_with('>')) {
            c.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Bytes in the unit that gives one to four digits before the point.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// `0-2, 6` for [0, 1, 2, 6].
pub fn ranges(sorted: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &n in sorted {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == n => *end = n,
            _ => runs.push((n, n)),
        }
    }
    let text: Vec<String> = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    text.join(", ")
}
