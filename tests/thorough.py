"""Cases that run only with `pytest --thorough`: more of a kind of which each run has some.

A run of all tests has to end within a quarter of an hour on two cores. The left-out cases take a quarter of an hour of a core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

NEVER = 0
EVERY = {  # of the cases of a test, each n-th one always runs; NEVER: only with --thorough
    "card/test_on_captured_decode.py::test_a_captured_step_is_the_ordinary_one": 3,
    "card/test_on_captured_decode.py::test_a_captured_step_reads_caches_in_8_bits": 4,
    "card/test_on_captured_decode.py::test_steps_with_guesses_are_captured_by_a_few_numbers_of_columns": 2,
    "card/test_on_captured_decode.py::test_what_a_neighbour_sent_leaves_nothing_behind": 2,
    "card/test_on_memory.py::test_a_microbatch_that_fits_only_where_graphs_are_computed_again": 3,
    "card/test_on_memory.py::test_a_node_moves_without_room_for_two_spans": 2,
    "card/test_on_packed.py::test_a_packed_model_on_a_card_is_the_plain_one": 4,
    "card/test_on_training.py::test_language_models": 2,
    "checkpoints/test_state_transfer.py::test_an_exported_state_is_what_most_of_its_holders_have": 2,
    "checkpoints/test_state_transfer.py::test_two_identities_do_not_decide_what_a_joining_stage_gets": 3,
    "cli/test_asking.py::test_modules_and_encoders_fit_as_they_are_exported": NEVER,
    "cli/test_host.py::test_an_encoder_goes_on_too": NEVER,
    "client/tuning/test_tuned_lm.py::test_a_plain_loop_draws_the_curve_of_peft": 4,
    "compute/graph/costs/test_estimate.py::test_activation_bytes_are_what_autograd_keeps": 3,
    "compute/graph/test_planning.py::test_a_plan_is_carried_out_as_fast_as_it_says": 2,
    "compute/graph/test_segment.py::test_split_graphs_train_as_the_module": 3,
    "compute/model/test_attention.py::test_fast_products_give_a_session_the_same_bits_in_any_company": 2,
    "compute/model/test_lean.py::test_a_model_compiles_in_a_process_that_has_built_one": NEVER,
    "compute/model/test_lean.py::test_decorators_for_the_compiler_take_effect_when_it_comes": NEVER,
    "compute/model/test_lean.py::test_modules_imported_meanwhile_are_found_in_the_real_package": NEVER,
    "compute/model/test_lean.py::test_nothing_is_left_behind_an_error": NEVER,
    "compute/model/test_lean.py::test_what_is_held_of_stand_ins_becomes_real_with_the_real_modules": NEVER,
    "compute/model/test_lean.py::test_what_the_stand_in_lacks_is_had_of_the_real_module": NEVER,
    "compute/model/test_quantised_weights.py::test_a_packed_model_is_the_plain_one": 3,
    "compute/serving/test_runner.py::test_ragged_steps_equal_lone_passes": 2,
    "compute/serving/test_sampling.py::test_the_distribution": 4,
    "compute/training/averaging/test_gradient_compressor.py::test_what_was_not_said_is_said_later": 2,
    "compute/training/test_grad_scaler.py::test_the_curve_is_that_of_float32": 4,
    "compute/training/test_heap.py::test_freed_tensors_go_back_to_the_system": NEVER,
    "compute/training/test_label_weights.py::test_a_microbatch_without_labels_counts_as_nothing": 5,
    "compute/training/test_label_weights.py::test_counts_that_nobody_knows_beforehand_are_refused": 3,
    "compute/training/test_label_weights.py::test_unequal_microbatches_train_as_the_whole_batch": 8,
    "compute/training/test_packing.py::test_packed_rows_train_as_separate_documents": 3,
    "conformance/test_network.py::test_after_close_everything_is_refused": 2,
    "contrib/test_attacks.py::test_withstood": 3,
    "contrib/test_compose.py::test_create_founds_once": NEVER,
    "contrib/test_gpu_benchmark.py::test_a_part_comes_to_its_end_on_a_cpu": 3,
    "contrib/test_placement_rules.py::test_best_response_comes_close_to_the_bound_and_to_rest": NEVER,
    "founding/test_language_graph.py::test_a_recurrent_family_trains_by_config_as_in_transformers": NEVER,
    "founding/test_trained.py::test_token_ids_are_llama_cpps": 9,
    "gateway/test_drafts.py::test_an_answer_is_the_same": 3,
    "gateway/test_encoders.py::test_classes_are_the_models": NEVER,
    "gateway/test_encoders.py::test_documents_are_ranked_by_a_cross_encoder": NEVER,
    "gateway/test_encoders.py::test_what_an_encoder_will_be_is_known_before_its_weights_are_read": NEVER,
    "gateway/test_evaluation.py::test_a_trained_model_scores_as_with_transformers": NEVER,
    "metrics/test_exposition.py::test_nobody_pays_who_does_not_ask": NEVER,
    "node/test_audits.py::test_one_false_position_of_a_prompt_is_enough": 2,
    "node/test_audits.py::test_reports_are_tried_before_they_are_believed": NEVER,
    "node/test_backups.py::test_a_run_whose_only_holder_is_lost_before_anything_is_kept_begins_anew": 2,
    "node/test_backups.py::test_a_run_whose_only_holder_is_lost_for_good_goes_on": NEVER,
    "node/test_drafts.py::test_the_text_is_the_same_however_tokens_are_drawn": 2,
    "node/test_faults.py::test_killed_nodes_do_not_change_the_text": 2,
    "node/test_float16_training.py::test_the_curve_of_one_process_in_float32": 2,
    "node/test_label_weights.py::test_a_run_keeps_the_rule_that_it_began_with": 4,
    "node/test_mtp.py::test_the_text_is_the_same_and_a_good_layer_saves_turns": 2,
    "node/test_organisation.py::test_who_trains_comes_to_another_layout_when_links_change_and_nothing_is_lost_with_it": NEVER,
    "node/test_packed.py::test_fast_products_say_the_same_in_company_at_other_cuts_and_after_a_kill_and_a_hang": 2,
    "node/test_packed.py::test_several_sessions_and_a_kill": 2,
    "node/test_quantised.py::test_two_nodes_say_what_the_plain_model_says": 2,
    "node/test_shared_beginnings.py::test_a_hop_of_the_first_one_is_killed": 2,
    "node/test_shared_beginnings.py::test_states_that_travel_compressed": 2,
    "node/test_training.py::test_a_unit_without_anybody_is_waited_for": NEVER,
    "node/test_training.py::test_replicas_killed_and_others_joining": NEVER,
    "node/test_training.py::test_the_curve_of_one_process": 2,
    "node/test_tuning.py::test_a_pass_whose_machine_fails_before_its_gradient_has_the_same_gradients": 2,
    "node/test_tuning.py::test_two_trainers_with_the_same_data_draw_the_curve_of_one_though_one_loses_a_hop": 2,
    "numerics/test_adapters.py::test_sessions_with_different_adapters_beside_one_another": 4,
    "numerics/test_families.py::test_gradients_of_three_pieces_are_those_of_the_whole": 10,
    "numerics/test_families.py::test_split_equals_whole": 10,
    "numerics/test_graph_families.py::test_a_family_trains_as_in_plain_torch": 30,
    "numerics/test_modules.py::test_a_module_trains_as_in_plain_torch": 24,
    "numerics/test_modules.py::test_what_a_graph_cannot_hold_is_refused_in_a_sentence": 6,
    "numerics/test_recurrent_families.py::test_a_failed_pass_leaves_the_states_as_they_were": 6,
    "numerics/test_recurrent_families.py::test_spans_with_states_equal_the_whole": 4,
    "numerics/test_recurrent_families.py::test_states_go_back_to_any_recent_position": 4,
    "numerics/test_windows.py::test_sessions_of_many_lengths_come_and_go": 2,
    "peer/test_placement.py::test_who_disturbs_others_by_moving_stays_the_longer_the_more_often_it_has_moved": 2,
    "plan/offline/test_grid_search.py::test_better_than_plain_annealing": NEVER,
    "plan/offline/test_grid_search.py::test_small_problems_are_solved": 3,
    "plan/test_expert_groups.py::test_choices_hold_in_a_simulation_of_single_messages": 2,
    "plan/training/test_measured_steps.py::test_a_simulated_step_takes_what_is_modelled": 3,
    "plan/training/test_resettling.py::test_all_come_to_their_places_and_each_unit_has_a_holder_all_the_time": 8,
    "real/test_adapters.py::test_two_nodes_serve_an_adapter_that_the_founder_gives_them": NEVER,
    "real/test_chat.py::test_a_pipe_is_one_message_and_only_the_answer_is_printed": NEVER,
    "real/test_demo.py::test_the_demo_succeeds": NEVER,
    "real/test_membership.py::test_invited_nodes_serve_an_invited_client": NEVER,
    "real/test_modules.py::test_a_module_trains_as_one_process_though_a_replica_is_killed": NEVER,
    "real/test_terminal.py::test_a_terminal_that_closes": 2,
    "real/test_two_friends.py::test_the_same_command_resumes_with_the_same_invite_and_is_not_run_twice": NEVER,
    "real/test_versions.py::test_neighbouring_versions_serve_together": 2,
    "real/test_versions.py::test_nodes_from_before_the_rooms_train_with_ours": NEVER,
    "real/test_weights.py::test_a_volunteers_own_file_is_enough": NEVER,
    "real/test_weights.py::test_an_invite_alone_is_enough_and_what_was_fetched_is_given_on": NEVER,
    "serving/test_chaos.py::test_nobody_waits_long_for_a_token_while_volunteers_come_and_go": 2,
    "simulate/environment/test_outlook.py::test_the_answers_are_those_that_peers_give_themselves": 3,
    "simulate/steps/test_training.py::test_averaging_seldom_or_with_a_codec_costs_less": NEVER,
    "simulate/steps/test_training.py::test_churn_costs_but_does_not_stop_and_is_the_same_each_time": NEVER,
    "simulate/steps/test_training.py::test_peers_find_places_so_that_pipelines_stay_on_their_islands": NEVER,
    "training/averaging/test_averaging.py::test_a_replica_dies_and_another_joins": 3,
    "training/averaging/test_averaging.py::test_replicas_end_equal_and_have_learnt": 3,
    "training/averaging/test_memory.py::test_averaging_takes_a_copy_of_the_gradients_and_little_beside": 4,
    "training/test_false_exchanges.py::test_a_liar_with_a_replica_gets_no_more_work": 20,
    "training/test_false_exchanges.py::test_at_the_default_share_it_takes_some_steps": 2,
    "training/test_fuzz.py::test_one_peer_falls_ill": 3,
    "training/test_hangs.py::test_a_step_that_fails_at_every_holder_ends_the_run_with_the_cause": 9,
    "training/test_liars.py::test_a_stage_that_one_trainer_slanders_works_for_another": 3,
    "training/test_liars.py::test_the_losses_are_those_of_one_process": 3,
    "training/test_not_finite.py::test_one_number_or_another_size_does_not_stop_the_others": 5,
    "training/test_not_finite.py::test_the_others_train_on": 2,
    "training/test_optimizers.py::test_a_swarm_computes_what_one_process_does": 2,
    "training/test_organisation.py::test_all_leave_for_another_layout_only_where_that_is_worth_it": 2,
    "training/test_organisation.py::test_the_slow_link_carries_the_least_whatever_the_names": 3,
    "training/test_robust.py::test_one_of_four_lies": 2,
    "tuning/client/test_shared_tuner.py::test_a_lost_hop_of_one_trainer_changes_nothing_and_costs_no_step": 2,
    "tuning/client/test_shared_tuner.py::test_compressed_parts_leave_all_trainers_equal_and_near": 3,
    "tuning/client/test_shared_tuner.py::test_two_trainers_are_one_process_on_all_of_their_microbatches": 2,
}


def further_cases(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that a run without --thorough leaves out."""
    seen: Counter[str] = Counter()
    found = set()
    for item in items:
        test = item.nodeid.removeprefix("tests/").partition("[")[0]
        every = EVERY.get(test, 1)
        if every == NEVER or seen[test] % every:
            found.add(item)
        seen[test] += 1
    return found
