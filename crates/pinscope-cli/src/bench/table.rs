//! The results as a table, and what it does not say.

use std::collections::{BTreeMap, BTreeSet};

use pinscope::memory::format_bytes;

use super::efficiency::{self, Efficiency};
use super::figures::Figures;
use super::Results;
use crate::launch::Contender;
use crate::style;

/// Prints the medians.
pub fn print(results: &Results) {
    let rate = |name: &str| {
        results.medians.iter().find(|f| f.contender == name).map(|f| f.tokens_per_second)
    };
    let resident = rate(Contender::Resident.name());
    let repacked = rate(Contender::ResidentRepacked.name());
    let mut table = style::table();
    table.set_header([
        "",
        "RAM",
        "prefill tok/s",
        "decode tok/s",
        "of resident",
        "of repacked",
        "ms a token",
        "hit rate",
        "pinned",
        "MB a token",
        "wait ms",
        "start s",
        "peak",
        "tokens",
    ]);
    for f in &results.medians {
        let maybe = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"))
        };
        let percent = |share: Option<f64>| match share {
            Some(share) => format!("{:.1} %", share * 100.0),
            None => "-".to_owned(),
        };
        table.add_row([
            f.contender.to_owned(),
            f.ram.map_or_else(|| "no limit".to_owned(), format_bytes),
            format!("{:.1}", f.prefill_tokens_per_second),
            format!("{:.2}", f.tokens_per_second),
            maybe(resident.map(|r| f.tokens_per_second / r), 2),
            maybe(repacked.map(|r| f.tokens_per_second / r), 2),
            format!("{:.1}", f.ms_per_token),
            percent(f.hit_rate),
            percent(f.pinned_hit_rate),
            maybe(f.bytes_per_token.map(|b| b / 1e6), 1),
            maybe(f.wait_ms_per_token, 1),
            format!("{:.1}", f.load_seconds),
            format_bytes(f.peak_bytes),
            format!("{}{}", f.decoded_tokens, if f.capped { " (time limit)" } else { "" }),
        ]);
    }
    style::numbers_right(&mut table);
    println!("{table}");
    where_time_goes(results);
    footnotes(results).iter().for_each(|note| println!("{note}"));
}

/// Prints the split of each of PinScope's rows, for decoding and the prompt.
fn where_time_goes(results: &Results) {
    for (what, of) in [
        ("Decoding", (|f| f.efficiency.as_ref()) as fn(&Figures) -> Option<&Efficiency>),
        ("The prompt", |f| f.prefill_efficiency.as_ref()),
    ] {
        let name = |f: &Figures| {
            let ram = f.ram.map_or_else(String::new, |r| format!(" {}", format_bytes(r)));
            format!("{}{ram}", f.contender)
        };
        let rows: Vec<_> = results.medians.iter().filter_map(|f| Some((name(f), of(f)?))).collect();
        if !rows.is_empty() {
            println!(
                "\n{what}: where the time goes, ms a token. Efficiency: the larger of arithmetic (rest and \
                 experts) and what the disk needs for the missing experts, by the time measured."
            );
            println!("{}", efficiency::table(&rows));
        }
    }
}

/// What the table does not say.
fn footnotes(results: &Results) -> Vec<String> {
    let row = |contender: &str, ram: Option<u64>| match ram {
        Some(ram) => format!("{contender} {}", format_bytes(ram)),
        None => contender.to_owned(),
    };
    let mut notes: Vec<String> = results
        .failed
        .iter()
        .map(|f| format!("{} did not run: {}", row(f.contender, f.ram), f.reason))
        .collect();
    if let Some(why) = results.runs.iter().find_map(|f| f.no_cgroup.as_ref()) {
        notes.push(format!(
            "Not limited by a cgroup ({why}): mmap may use all memory, peaks are what processes had mapped in."
        ));
    }
    if results.medians.iter().any(|f| f.capped) {
        notes.push("time limit: decoding with mmap ended at --mmap-seconds.".into());
    }
    let mut by_hash = BTreeMap::<(&str, usize), BTreeSet<String>>::new();
    for f in &results.runs {
        if let Some(hash) = &f.sha256_logits {
            by_hash.entry((hash, f.decoded_tokens)).or_default().insert(row(f.contender, f.ram));
        }
    }
    for ((hash, tokens), rows) in by_hash {
        let rows = rows.into_iter().collect::<Vec<_>>().join(", ");
        let hash = hash.get(..16).unwrap_or(hash);
        notes.push(format!("Logits of the prompt and {tokens} tokens, SHA-256 {hash}: {rows}"));
    }
    notes
}
