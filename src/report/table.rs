//! Terminal tables in one style, and the forms of numbers.

use comfy_table::{
    Cell, CellAlignment, Color, ColumnConstraint, ContentArrangement, Table as Comfy, TableComponent, Width, presets,
};

use super::page::{Look, clean, wrap};
use super::verdict::Verdict;

/// Narrower than this, the last column stands beneath its row where it is prose: of more columns than `LONG`.
const WIDE: usize = 100;
const LONG: usize = 48;

/// The head of the column that holds verdicts.
const VERDICT: &str = "verdict";

/// A table.
pub struct Table {
    heads: Vec<Head>,
    rows: Vec<Vec<String>>,
    shown: Shown,
    /// Columns that each has, but for the last; where none are given, what the rows need.
    widths: Option<Vec<u16>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Whole,
    HeadOnly,
    RowsOnly,
}

struct Head {
    name: String,
    right: bool,
}

impl Table {
    /// A table with `columns` as its head. A name that starts with `>` is right-aligned.
    pub fn new(columns: &[&str]) -> Self {
        let head = |c: &&str| Head { name: c.trim_start_matches('>').into(), right: c.starts_with('>') };
        Table { heads: columns.iter().map(head).collect(), rows: Vec::new(), shown: Shown::Whole, widths: None }
    }

    /// Two columns without a head: names and values.
    pub fn facts() -> Self {
        Table { shown: Shown::RowsOnly, ..Table::new(&["", ""]) }
    }

    /// The head alone of a table whose rows come one after another; `widths` are those of all columns but the last.
    pub fn streamed(columns: &[&str], widths: &[u16]) -> Self {
        Table { shown: Shown::HeadOnly, widths: Some(widths.into()), ..Table::new(columns) }
    }

    /// One more row of a table that comes row by row.
    pub fn next<S: Into<String>>(columns: &[&str], widths: &[u16], cells: impl IntoIterator<Item = S>) -> Self {
        let mut table = Table { shown: Shown::RowsOnly, ..Table::streamed(columns, widths) };
        table.row(cells);
        table
    }

    /// Adds a row.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(|c| clean(&c.into()).into_owned()).collect());
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table's lines, without trailing spaces.
    pub(super) fn render(&self, look: Look) -> String {
        let width = look.width;
        let prose = self.heads.len() > 2 && self.heads.last().is_some_and(|h| !h.right);
        let is_long = || self.needs(self.heads.len() - 1) > LONG && self.natural() > width;
        if width >= WIDE || !prose || (self.widths.is_none() && !is_long()) {
            return self.lines(self.heads.len(), &self.rows, self.shown, look, width);
        }
        let beside = self.heads.len() - 1;
        let mut out = match self.shown {
            Shown::RowsOnly => String::new(),
            _ => self.lines(self.heads.len() - 1, &[], Shown::HeadOnly, look, width),
        };
        for row in &self.rows {
            let text = wrap(&format!("    {}", row.last().map_or("", |c| c)), width);
            let line = self.lines(beside, std::slice::from_ref(row), Shown::RowsOnly, look, width);
            for part in [line, text] {
                if !out.is_empty() && !part.trim().is_empty() {
                    out.push('\n');
                }
                out.push_str(part.trim_end());
            }
        }
        out
    }

    /// The widest content of a column, with the space beside it.
    fn needs(&self, column: usize) -> usize {
        let cells = self.rows.iter().filter_map(|r| r.get(column)).chain([&self.heads[column].name]);
        cells.map(|c| textwrap::core::display_width(c)).max().unwrap_or(0) + 2
    }

    fn natural(&self) -> usize {
        (0..self.heads.len()).map(|c| self.needs(c)).sum()
    }

    fn lines(&self, columns: usize, rows: &[Vec<String>], shown: Shown, look: Look, width: usize) -> String {
        let mut table = Comfy::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
        table.set_style(TableComponent::HeaderLines, '─').set_style(TableComponent::MiddleHeaderIntersections, '─');
        table.set_width(width as u16);
        match look.colour {
            true => table.enforce_styling(),
            false => table.force_no_tty(),
        };
        let heads = &self.heads[..columns];
        if shown != Shown::RowsOnly {
            table.set_header(heads.iter().map(|h| Cell::new(&h.name)));
        }
        for row in rows {
            let paint = |(text, head): (&String, &Head)| {
                let verdict = Verdict::named(text).filter(|_| look.colour && head.name == VERDICT);
                verdict.map_or(Cell::new(text), |v| Cell::new(text).fg(Color::AnsiValue(v.colour())))
            };
            table.add_row(row.iter().zip(heads).map(paint));
        }
        let stacked = columns < self.heads.len();
        for (i, head) in heads.iter().enumerate() {
            let Some(column) = table.column_mut(i) else { continue };
            if head.right {
                column.set_cell_alignment(CellAlignment::Right);
            }
            let fixed = match &self.widths {
                Some(widths) => widths.get(i).map(|w| self.needs(i).max(usize::from(*w)) as u16),
                None => (stacked && i + 1 < columns).then(|| self.needs(i).min(width / 2) as u16),
            };
            if let Some(fixed) = fixed {
                column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(fixed)));
            }
        }
        let text = table.to_string();
        text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
    }
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
    if unit == 0 { format!("{n} B") } else { format!("{} {}", short(value), UNITS[unit]) }
}

/// A number of at least 1 in at most five digits, four of them where it has a fraction; larger ones with an exponent.
pub fn short(x: f64) -> String {
    if x >= 99_999.5 {
        return format!("{x:.2e}");
    }
    let decimals = if x < 99.995 { 2 } else { usize::from(x < 999.95) };
    format!("{x:.decimals$}")
}

/// Bytes per second.
pub fn rate(bytes_per_second: f64) -> String {
    format!("{} GB/s", short(bytes_per_second / 1e9))
}

/// `1 file`, `2 files`.
pub fn plural(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
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
    fn numbers_have_few_digits() {
        let shown = [0.5, 99.99, 99.999, 999.94, 999.96, 98_765.4, 123_456.7, f64::INFINITY].map(short);
        assert_eq!(shown, ["0.50", "99.99", "100.0", "999.9", "1000", "98765", "1.23e5", "inf"]);
    }

    #[test]
    fn a_table_holds_at_every_width() {
        let mut table = Table::new(&["stage", "check", "verdict", "evidence"]);
        let long = "one word after another, ".repeat(8);
        table.row(["weights", "blk.3.ffn_down rank 2", "NONDETERMINISTIC", &long]);
        table.row(["weights", "a\u{1b}[2K", "MATCH", "short"]);
        for width in (60..=140).step_by(7) {
            let text = table.render(Look { width, colour: false });
            for line in text.lines() {
                assert!(textwrap::core::display_width(line) <= width && line.trim_end() == line, "{width}:\n{text}");
            }
            assert!(text.contains("NONDETERMINISTIC") && !text.contains('\u{1b}'), "{width}:\n{text}");
        }
        let colour = table.render(Look { width: 120, colour: true });
        assert!(colour.contains("38;5;1m NONDETERMINISTIC"), "{colour:?}");
    }

    #[test]
    fn bytes_have_a_unit() {
        assert_eq!(
            (bytes(1023), bytes(1024), bytes(53_463_023_616)),
            ("1023 B".into(), "1.00 KiB".into(), "49.79 GiB".into())
        );
    }
}
