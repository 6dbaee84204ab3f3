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

/// Two columns without a head: names and values.
pub fn facts() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if !table.is_tty() {
        table.set_width(DEFAULT_WIDTH);
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

/// `0-2, 6` for [0, 1, 2, 6]. Four or more runs of one length and one distance become `6, 10, .., 74`.
pub fn ranges(sorted: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &n in sorted {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == n => *end = n,
            _ => runs.push((n, n)),
        }
    }
    let name = |(a, b): (usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    let mut out = Vec::new();
    let mut rest = runs.as_slice();
    while let Some((&first, tail)) = rest.split_first() {
        let step = tail.first().map_or(0, |next| next.0 - first.0);
        let regular = |pair: &[(usize, usize)]| (pair[1].0 - pair[0].0, pair[1].1 - pair[0].1) == (step, step);
        let many = 1 + rest.windows(2).take_while(|pair| regular(pair)).count();
        if many >= 4 {
            out.extend([name(first), name(rest[1]), "..".into(), name(rest[many - 1])]);
            rest = &rest[many..];
        } else {
            out.push(name(first));
            rest = tail;
        }
    }
    out.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_shortened_without_loss() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[0, 1, 2, 6]), "0-2, 6");
        assert_eq!(ranges(&[0, 1, 2, 6, 10, 14]), "0-2, 6, 10, 14");
        let full: Vec<usize> = (0..78).filter(|i| (i + 1usize).saturating_sub(3).is_multiple_of(4)).collect();
        assert_eq!(ranges(&full), "0-2, 6, 10, .., 74");
        let shared: Vec<usize> = (0..78).filter(|i| !full.contains(i) && *i != 8).collect();
        assert_eq!(ranges(&shared), "3-5, 7, 9, 11-13, 15-17, .., 75-77");
        assert_eq!(ranges(&[0, 2, 4, 6, 9]), "0, 2, .., 6, 9");
    }

    #[test]
    fn bytes_have_a_unit() {
        assert_eq!(
            (bytes(1023), bytes(1024), bytes(53_463_023_616)),
            ("1023 B".into(), "1.00 KiB".into(), "49.79 GiB".into())
        );
    }
}
