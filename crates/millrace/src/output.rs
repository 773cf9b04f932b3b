//! What commands print.

use std::{
    error::Error,
    io::{self, Write},
};

use serde::Serialize;

/// Writes to standard output. Unlike `print!`, a reader that went away is no panic.
pub(crate) fn bytes(bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let mut output = io::stdout().lock();
    output.write_all(bytes)?;
    Ok(output.flush()?)
}

/// Writes a line.
pub(crate) fn line(text: &str) -> Result<(), Box<dyn Error>> {
    bytes(format!("{text}\n").as_bytes())
}

/// Writes a value as JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Box<dyn Error>> {
    line(&serde_json::to_string_pretty(value)?)
}

/// Rows of text under a heading, aligned.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(heading: &[&str]) -> Self {
        Self { rows: vec![heading.iter().map(|&cell| cell.to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        let render = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(render).collect::<Vec<_>>().join("\n")
    }
}

/// Names and values, one a line.
pub(crate) fn facts(facts: &[(&str, String)]) -> String {
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 1;
    let lines = facts.iter().map(|(name, value)| format!("{:width$} {value}", format!("{name}:")));
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NAME", "SIZE"]);
        table.row(["a".to_owned(), "1G".to_owned()]);
        table.row(["longer-name".to_owned(), "4096".to_owned()]);
        assert_eq!(table.render(), "NAME         SIZE\na            1G\nlonger-name  4096");
    }

    #[test]
    fn facts_stand_under_each_other() {
        assert_eq!(facts(&[("a", "1".to_owned()), ("long", "2".to_owned())]), "a:    1\nlong: 2");
    }
}
